"""The bridge between the loop's thread and a coroutine, without sleeping and without real clocks."""

from __future__ import annotations

import asyncio
import threading

import pytest

from runtime_service.core.sampled import SampledToken
from runtime_service.streaming.events import Failure, TokenDelta, Usage
from runtime_service.streaming.readers import Readers
from runtime_service.streaming.stream import TokenStream
from shared.errors import InternalError, ReaderStalled

USAGE = Usage(prompt_tokens=1, generated_tokens=1)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def delta(text, index=0):
    return TokenDelta(index, (SampledToken(len(text)),), text)


async def everything(stream):
    return [event async for event in stream]


async def test_events_come_in_order_and_usage_ends_them():
    stream = TokenStream(readers=Readers())
    events = [delta(str(i), index=i) for i in range(5)]
    assert all(stream.put(event) for event in events)
    assert not stream.closed
    assert stream.put(USAGE)
    assert stream.closed
    assert await everything(stream) == [*events, USAGE]


async def test_a_waiting_reader_is_woken_from_another_thread():
    readers = Readers()
    stream = TokenStream(readers=readers)
    reader = asyncio.create_task(everything(stream))
    await asyncio.sleep(0)  # the reader is waiting now

    def produce():
        for i in range(1000):
            assert stream.put(delta(f"{i} "))
            readers.release()
        assert stream.put(USAGE)

    producer = threading.Thread(target=produce)
    producer.start()
    *deltas, last = await reader
    assert "".join(event.text for event in deltas) == "".join(f"{i} " for i in range(1000))
    assert last == USAGE
    producer.join()


async def test_deltas_of_a_sample_that_wait_together_are_read_as_one():
    stream = TokenStream(readers=Readers())
    for text, index in (("a", 0), ("bc", 0), ("d", 1), ("e", 0)):
        assert stream.put(delta(text, index))
    assert stream.put(USAGE)
    joined = TokenDelta(0, (SampledToken(1), SampledToken(2)), "abc")
    assert await everything(stream) == [joined, delta("d", 1), delta("e"), USAGE]


async def test_not_more_are_read_as_one_than_a_message_should_hold():
    stream = TokenStream(readers=Readers())
    assert all(stream.put(delta("x")) for _ in range(100))
    assert stream.put(USAGE)
    *deltas, _ = await everything(stream)
    assert [len(event.tokens) for event in deltas] == [64, 36]


@pytest.mark.parametrize("last", [USAGE, Failure(InternalError("broken"))])
async def test_a_stream_ends_once(last):
    stream = TokenStream(readers=Readers())
    assert stream.put(last)
    assert not stream.put(delta("late"))
    assert not stream.put(Failure(InternalError("second")))
    assert await everything(stream) == [last]


async def test_a_reader_that_lets_too_much_gather_is_cut_off():
    stream = TokenStream(capacity=3, readers=Readers())
    kept = [delta(str(i), index=i) for i in range(3)]
    assert all(stream.put(event) for event in kept)
    assert not stream.put(delta("one too many"))
    assert stream.closed
    assert not stream.put(USAGE)
    *shown, last = await everything(stream)
    assert shown == kept
    assert isinstance(last, Failure)
    assert isinstance(last.error, ReaderStalled)
    assert "3 events unread" in last.error.message


async def test_a_reader_that_takes_nothing_for_too_long_is_cut_off():
    clock = Clock()
    stream = TokenStream(stall_after_s=30.0, clock=clock, readers=Readers())
    clock.now = 100.0  # an empty stream does not age
    assert stream.put(delta("a"))
    clock.now = 130.0
    assert stream.put(delta("b", 1))
    clock.now = 130.1
    assert not stream.put(delta("c"))
    *shown, last = await everything(stream)
    assert shown == [delta("a"), delta("b", 1)]
    assert isinstance(last.error, ReaderStalled)


async def test_taking_one_event_is_progress():
    clock = Clock()
    stream = TokenStream(stall_after_s=30.0, clock=clock, readers=Readers())
    stream.put(delta("a"))
    stream.put(delta("b", 1))
    clock.now = 29.0
    assert await anext(stream) == delta("a")
    clock.now = 58.0
    assert stream.put(delta("c"))


async def test_a_closed_reader_drops_what_waits_and_refuses_more():
    stream = TokenStream(readers=Readers())
    stream.put(delta("a"))
    stream.close()
    stream.close()
    assert stream.closed
    assert not stream.put(delta("b"))
    assert await everything(stream) == []


async def test_close_wakes_a_waiting_reader():
    stream = TokenStream(readers=Readers())
    reader = asyncio.create_task(everything(stream))
    await asyncio.sleep(0)
    stream.close()
    assert await reader == []


async def test_a_cancelled_reader_leaves_the_stream_usable():
    readers = Readers()
    stream = TokenStream(readers=readers)
    reader = asyncio.create_task(everything(stream))
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    assert stream.put(USAGE)
    readers.release()
    await asyncio.sleep(0)  # what that scheduled has run
    assert await everything(stream) == [USAGE]
    assert faults == []


def test_a_reader_whose_event_loop_is_gone_does_not_hurt_the_producer():
    readers = Readers()
    stream = TokenStream(readers=readers)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(anext(stream))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert stream.put(delta("a"))
    readers.release()
    assert not waiting.done()
    waiting._log_destroy_pending = False
