"""Words of the command line turned into messages; every refusal names the option."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.errors import FieldOutOfRange
from shared.pb.quire.v1 import common_pb2, compiler_pb2, inference_pb2
from shared.profiles import parse_profile
from shared.rpc.messages import profile_message

DEFAULT_PROFILES = ("decode=8x1", "prefill=1x128")
DEFAULT_INTERVAL = 64
UINT32_MAX, UINT64_MAX = 2**32 - 1, 2**64 - 1
"""What a field of a message holds; the caps are the services'."""
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_BYTES = {"": 1, "B": 1} | {
    f"{letter}{unit}": base**power for power, letter in enumerate("KMGT", 1) for unit, base in (("B", 1000), ("iB", 1024))
}


def enum_value(enum: Any, prefix: str, word: str, option: str) -> Any:
    """The value of `PREFIX_WORD`; FieldOutOfRange listing the words there are. `enum` is a generated enum wrapper."""
    names: dict[str, int] = dict(enum.items())
    key = f"{prefix}_{word.upper()}"
    if key not in names or names[key] == 0:
        words = ", ".join(sorted(n.removeprefix(prefix + "_").lower() for n, v in names.items() if v))
        raise FieldOutOfRange(f"{option} must be one of {words}; got {word!r}", field=option)
    return names[key]


def word_of(enum: Any, prefix: str, value: int) -> str:
    """`paged` for KV_LAYOUT_PAGED."""
    return str(enum.Name(value)).removeprefix(prefix + "_").lower()


def profile_words(profiles: Iterable[common_pb2.OptimizationProfile]) -> str:
    """`decode=8x1 prefill=1x128`: the largest shape of each."""
    return " ".join(f"{p.name}={p.batch.max}x{p.query_len.max}" for p in profiles)


def target_words(text: str) -> list[str]:
    """`sm80,sm89` as its words; none for an empty text."""
    return [word for word in text.split(",") if word]


def compile_spec(
    source: str,
    backend: str,
    layout: str,
    dtype: str,
    max_len: int,
    page_size: int,
    profiles: Sequence[str],
    targets: Sequence[str] = (),
    *,
    allow_copying: bool = False,
    constant_weights: bool = False,
) -> compiler_pb2.CompileSpec:
    """A spec whose source, where it is a path on this machine, is absolute."""
    path = Path(source).expanduser()
    return compiler_pb2.CompileSpec(
        source=str(path.resolve()) if path.exists() else source,
        backend=enum_value(common_pb2.Backend, "BACKEND", backend, "--backend"),
        layout=enum_value(common_pb2.KVLayout, "KV_LAYOUT", layout, "--layout"),
        dtype=enum_value(common_pb2.ElementType, "ELEMENT_TYPE", dtype, "--dtype"),
        max_len=max_len,
        page_size=page_size if layout == "paged" else 0,
        profiles=[profile_message(parse_profile(word)) for word in profiles or DEFAULT_PROFILES],
        targets=targets,
        allow_copying=allow_copying,
        constant_weights=constant_weights,
    )


def kv_options(compaction: str | None) -> inference_pb2.KVOptions:
    """`off`, or `policy=sink_recent,budget=256,interval=64[,sinks=4][,mode=hole_filling]`; None leaves the engine's default."""
    if compaction is None:
        return inference_pb2.KVOptions()
    if compaction == "off":
        return inference_pb2.KVOptions(off=True)
    fields: dict[str, str] = {}
    for part in compaction.split(","):
        name, equals, value = part.partition("=")
        if not equals or name not in ("policy", "budget", "interval", "sinks", "mode") or name in fields:
            raise FieldOutOfRange(
                f"--compaction is off or policy=NAME,budget=N[,interval=N][,sinks=N][,mode=MODE]; got {compaction!r}",
                field="--compaction",
            )
        fields[name] = value
    if not fields.get("policy") or "budget" not in fields:
        raise FieldOutOfRange(f"--compaction needs policy=NAME and budget=N; got {compaction!r}", field="--compaction")

    def number(name: str) -> int:
        text = fields[name]
        if not text.isdecimal() or len(text) > len(str(UINT32_MAX)) or int(text) > UINT32_MAX:
            raise FieldOutOfRange(
                f"--compaction {name} must be a whole number up to {UINT32_MAX}; got {text[:40]!r}", field="--compaction"
            )
        return int(text)

    options = inference_pb2.CompactionOptions(
        name=fields["policy"],
        budget=number("budget"),
        interval=number("interval") if "interval" in fields else DEFAULT_INTERVAL,
    )
    if "sinks" in fields:
        options.sinks = number("sinks")
    if "mode" in fields:
        options.mode = enum_value(common_pb2.CompactionMode, "COMPACTION_MODE", fields["mode"], "--compaction mode")
    return inference_pb2.KVOptions(policy=options)


def seconds(text: str, option: str) -> float:
    """`30d`, `12h`, `90m`, `10s`."""
    return _quantity(text, _SECONDS, option, "a number and one of s, m, h, d, such as 30d")


def byte_count(text: str, option: str) -> int:
    """`1000`, `500MB`, `20GiB`."""
    count = int(_quantity(text, _BYTES, option, "a number, with or without one of KB to TB and KiB to TiB, such as 20GiB"))
    if count > UINT64_MAX:
        raise FieldOutOfRange(f"{option} must be at most {UINT64_MAX} bytes; got {text[:40]!r}", field=option)
    return count


def _quantity(text: str, units: Mapping[str, int], option: str, expected: str) -> float:
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]*)", text)
    if found is None or found[2] not in units:
        raise FieldOutOfRange(f"{option} must be {expected}; got {text[:40]!r}", field=option)
    return float(found[1]) * units[found[2]]
