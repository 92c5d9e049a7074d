"""`make families`: what becomes of every family of decoders of `transformers`, tiny and random, on the way to TensorRT-RTX.

    python -m tests.bench.families [FAMILY[:EXPORT]...] [--markdown]

The family's stock static-cache step as its users export it (dynamic query length, window layers of full length), adopted, and for
OPT once more with its positions as an input; and our own export of configurations we take as checkpoints. All are proved, run on
the CPU against the model without a cache (6 tokens of prefill, 6 of decode, past every window) and built into an engine here. One
that crashes takes its process along, not the table.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind
from transformers import PreTrainedModel

from compiler_service.export.geometry import cache_spec
from compiler_service.export.program import DecoderProgram, export_decoder
from compiler_service.ingest import families as ingest_families
from compiler_service.ingest.program_caches import cache_values, find_caches
from compiler_service.lowering.adopt import adopt_program
from compiler_service.proof.decoder import prove_decoder
from shared.bindings import POSITION_IDS
from shared.errors import QuireError
from shared.kv_spec import DType, KVCacheSpec, LayerGroup, Layout
from shared.profiles import ProfileSet, parse_profile
from tests.support.decoder_steps import int32
from tests.support.families import FAMILIES, family_config, family_model
from tests.support.stock_export import export_stock
from tests.support.tensorrt_engines import BACKEND

MAX_LEN, LONGEST = 32, 16
PREFILL, TOKENS = 6, 12
PROFILES = ProfileSet((parse_profile("decode=1x1"), parse_profile("prefill=1x16")))
TOLERANCE = 2e-3
NO_WEIGHTS = Path("/nonexistent")
"""Engines that take their weights as inputs read none."""


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one export. `right`: its logits are the model's. `reason` where it did not become an engine."""

    exported: bool = False
    proven: int = 0
    writes: int = 0
    right: bool = False
    engines: int = 0
    fallbacks: int = 0
    aliased: int = 0
    reason: str = ""

    @property
    def wrongly_accepted(self) -> bool:
        return self.engines > 0 and not self.right


def stock(model: PreTrainedModel, *, positions: bool = False) -> DecoderProgram:
    """Keys and values may differ in size here: that is the pools' limit, not the engine's."""
    program = export_stock(model, MAX_LEN, LONGEST, positions=positions).run_decompositions({})
    layers = find_caches(program)
    keys = [cache_values(program, layers)[layer.k] for layer in layers]
    groups = tuple(LayerGroup((i,), int(k.shape[1]), int(k.shape[3]), DType.FLOAT32) for i, k in enumerate(keys))
    return adopt_program(program, layers, KVCacheSpec(groups, Layout.LINEAR, MAX_LEN, MAX_LEN), PROFILES)


def ours(model: PreTrainedModel) -> DecoderProgram:
    config = copy.deepcopy(model.config)  # exporting chooses its attention in it
    spec = cache_spec(config, DType.FLOAT32, Layout.LINEAR, MAX_LEN, MAX_LEN)
    return export_decoder(config, spec, PROFILES, static_cache=True)


EXPORTS = {"stock": stock, "positions": partial(stock, positions=True), "ours": ours}
CHECKPOINTS = tuple(family.model_class.config_class.model_type for family in ingest_families.FAMILIES)
COUNTS_POSITIONS = ("opt",)
"""Families that count positions out of a mask of ones if they are given none, which torch.export takes for two tokens or more."""


def exports_of(family: str) -> list[str]:
    """Our own export is of what the compiler takes as a checkpoint."""
    only = {"positions": COUNTS_POSITIONS, "ours": CHECKPOINTS}
    return [how for how in EXPORTS if family in only.get(how, (family,))]


def fate(family: str, how: str) -> Fate:
    """Every refusal is a row of the table; an error of torch's export says that it cannot be exported."""
    model = family_model(family_config(family))
    try:
        program = EXPORTS[how](model)
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises while it is traced is the answer
        return Fate(reason=_short(error))
    writes = 2 * program.cache.num_layers
    try:
        lowered = BACKEND.lower(program)
        report = prove_decoder(program, lowered)
    except (QuireError, RuntimeError, IndexError, AssertionError, TypeError, ValueError) as error:  # the program's own
        return Fate(exported=True, writes=writes, reason=_short(error))
    proven = len(report.proven_nodes)
    try:
        right = says_what_the_model_says(program, model)
    except (RuntimeError, IndexError, AssertionError) as error:  # it does not run at all
        return Fate(True, proven, writes, reason=_short(error))
    if not report.ok:
        return Fate(True, proven, writes, right, reason=report.refusals[0].reason)
    try:
        with tempfile.TemporaryDirectory() as directory:
            built = BACKEND.build(lowered, report, NO_WEIGHTS, Path(directory), lambda fraction, what: None)
    except (QuireError, RuntimeError, AssertionError, TypeError, ValueError, AttributeError) as error:  # converters raise them all
        return Fate(True, proven, writes, right, reason=_short(error))
    return Fate(True, proven, writes, right, engines=1, aliased=len(built.aliases))


def says_what_the_model_says(program: DecoderProgram, model: PreTrainedModel) -> bool:
    """On the CPU, before any backend: the step's logits against the model's own from scratch."""
    module = program.program.module(check_guards=False)
    state, bound = model.state_dict(), dict(module.named_parameters())
    for spec in program.program.graph_signature.input_specs:
        if spec.kind is InputKind.PARAMETER and spec.target in bound:
            name = program.weights[spec.target]
            bound[spec.target].data = state.get(name, bound[spec.target].data)
    placeholders = {node.name: node.meta["val"] for node in program.program.graph.find_nodes(op="placeholder")}
    caches = [
        torch.full([s if isinstance(s, int) else 1 for s in placeholders[name].shape], 1e4)
        for name, binding in program.inputs.items()
        if "_cache." in binding
    ]
    half = len(caches) // 2
    # Our export takes the keys and the values as two lists.
    nested = any(not argument.is_leaf() for argument in program.program.call_spec.in_spec.child(0).children())
    packed = [caches[:half], caches[half:]] if nested else caches
    tokens = torch.randint(3, 90, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        for start, end in ((0, PREFILL), *((at, at + 1) for at in range(PREFILL, TOKENS))):
            positions = [int32([list(range(start, end))])] if POSITION_IDS in program.inputs.values() else []
            got: Tensor = module(int32([tokens[start:end]]), *positions, int32([start]), int32([end - start - 1]), *packed)
            if not torch.allclose(got[0], wanted[end - 1], atol=TOLERANCE, rtol=TOLERANCE):
                return False
    return True


def _short(error: Exception) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line}"[:160]


def table(items: Sequence[str]) -> Iterator[tuple[str, str, Fate]]:
    """(family, export, fate) of items such as `llama:stock`, as children report them. A child that dies is replaced by one that
    goes on behind the cause."""
    pending = list(items)
    while pending:
        command = [sys.executable, "-m", "tests.bench.families", "--child", *pending]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    yield (*pending.pop(0).split(":"), Fate(**json.loads(line)))  # two parts, see above
        if child.returncode and pending:
            yield (*pending.pop(0).split(":"), Fate(reason=f"the process died with status {child.returncode}"))


def markdown(rows: Sequence[tuple[str, str, Fate]]) -> Iterator[str]:
    yield "| family | export | exported | proven | logits | engines | fallbacks | aliased | reason |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for family, how, f in rows:
        counted = f"{f.proven}/{f.writes} | {'right' if f.right else 'wrong'}" if f.writes else "- | -"
        yield (
            f"| {family} | {how} | {'yes' if f.exported else 'no'} | {counted} | {f.engines} | {f.fallbacks} | "
            f"{f.aliased}/{f.writes} | {f.reason.replace('|', '/')} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", help=f"llama, or llama:stock for one export; of {', '.join(FAMILIES)}")
    parser.add_argument("--markdown", action="store_true", help="the table of compiler_service/README.md")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        for item in options.child:
            print("\n" + json.dumps(asdict(fate(*item.split(":")))), flush=True)
        return 0
    rows = []
    named = options.families or FAMILIES
    items = [item for name in named for item in ([name] if ":" in name else [f"{name}:{how}" for how in exports_of(name)])]
    for family, how, found in table(items):
        rows.append((family, how, found))
        if not options.markdown:
            print(f"{family:18} {how:6} {found}", flush=True)
    if options.markdown:
        print("\n".join(markdown(rows)))
    return 1 if any(found.wrongly_accepted for _, _, found in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
