"""Requests as the tests and benchmarks make them."""

from __future__ import annotations

from shared.pb.quire.v1 import inference_pb2


def greedy_request(engine: str, prompt: list[int], max_tokens: int, **compaction: object) -> inference_pb2.GenerateRequest:
    kv = inference_pb2.KVOptions(off=True)
    if compaction:
        kv = inference_pb2.KVOptions(policy=inference_pb2.CompactionOptions(**({"name": "sink_recent"} | compaction)))
    return inference_pb2.GenerateRequest(
        engine=engine,
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=inference_pb2.Sampling(temperature=0.0),
        stopping=inference_pb2.Stopping(max_tokens=max_tokens, ignore_eos=True),
        kv=kv,
    )
