"""Proof of a whole program: every cache, before and after lowering, as a report, as certificates and as a refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.export import ExportedProgram

from compiler_service.ingest.program_caches import shared_memory
from compiler_service.proof.algebra import ONE
from compiler_service.proof.bounds import find_overrun
from compiler_service.proof.consistency import Readers, find_inconsistency, find_readers
from compiler_service.proof.evaluate import Values
from compiler_service.proof.hazards import find_hazard
from compiler_service.proof.positions import find_wrong_positions
from compiler_service.proof.program import CacheDecl, Program, read_program
from compiler_service.proof.verdict import Proved, Refuted, Run, Unknown, Verdict
from compiler_service.proof.writes import Write, read_write
from shared.bindings import WRITE_START
from shared.errors import WriteNotProven
from shared.manifest import WriteCertificate
from shared.profiles import OptimizationProfile


@dataclass(frozen=True, slots=True)
class WriteProof:
    """One cache of one program. `node` writes it, from the rows `update`, whose axis `update_axes[a]` runs along cache axis `a`."""

    cache: str
    node: str
    form: str
    verdict: Verdict
    update: str
    update_axes: tuple[int | None, ...]

    @property
    def run(self) -> Run | None:
        return self.verdict.run if isinstance(self.verdict, Proved) else None

    def require_start(self, starts: str) -> None:
        """WriteNotProven unless each row of this proven write begins where the input `starts` [rows] says."""
        assert self.run is not None
        own = {f"{starts}[row]"} | ({f"{starts}[0]", starts} if self.run.rows == ONE else set())
        if str(self.run.start) not in own:
            raise WriteNotProven(f"{self.node} writes {self.cache} from {self.run.start}; the engine's starts are {WRITE_START}")


@dataclass(frozen=True, slots=True)
class CacheProof:
    """The same cache before and after lowering."""

    before: WriteProof
    after: WriteProof

    @property
    def cache(self) -> str:
        return self.before.cache

    @property
    def reason(self) -> str:
        """Why this write may not be done in place; empty if it may."""
        for stage, proof in (("before lowering", self.before), ("after lowering", self.after)):
            if not isinstance(proof.verdict, Proved):
                return f"{stage}: {proof.verdict}"
        before, after = self.before.run, self.after.run
        assert before is not None
        assert after is not None
        if not before.agrees(after):
            return f"the run changed: before lowering {before}, after it {after}"
        return ""

    @property
    def ok(self) -> bool:
        return not self.reason

    def certificate(self) -> WriteCertificate:
        """The record of the manifest. The builder fills in `binding` and `aliased` from what it reads back."""
        run = self.after.run
        return WriteCertificate(
            cache=self.cache,
            node=self.after.node,
            form=self.after.form,
            axis=run.axis if run else -1,
            start=str(run.start) if run else "",
            length=str(run.length) if run else "",
            verdict_before=str(self.before.verdict),
            verdict_after=str(self.after.verdict),
            binding="",
            aliased=False,
            reason=self.reason,
        )


@dataclass(frozen=True, slots=True)
class ExplainRow:
    """One line of `quire explain`."""

    cache: str
    node: str
    form: str
    run: str
    verdict: str
    reason: str


@dataclass(frozen=True, slots=True)
class ProofReport:
    """Verdicts for every cache of a program, in the order the caches were named."""

    caches: tuple[CacheProof, ...]

    @property
    def ok(self) -> bool:
        return not self.refusals

    @property
    def refusals(self) -> tuple[CacheProof, ...]:
        return tuple(proof for proof in self.caches if not proof.ok)

    @property
    def certificates(self) -> tuple[WriteCertificate, ...]:
        return tuple(proof.certificate() for proof in self.caches)

    @property
    def proven_nodes(self) -> frozenset[str]:
        """Names of the write nodes of the lowered program that may be rewritten or aliased."""
        return frozenset(proof.after.node for proof in self.caches if proof.ok)

    def __getitem__(self, cache: str) -> CacheProof:
        for proof in self.caches:
            if proof.cache == cache:
                return proof
        raise KeyError(cache)

    def require(self) -> None:
        """WriteNotProven naming each refused cache, its node and the reason; nothing if every cache is proven."""
        refused = self.refusals
        if not refused:
            return
        lines = [f"{proof.cache}: {proof.reason}" for proof in refused]
        raise WriteNotProven(
            f"every cache write must be one contiguous run a row; {len(refused)} of {len(self.caches)} are not proven:\n  "
            + "\n  ".join(lines)
            + "\nRewrite these writes as a run from one start, or allow the copying fallback",
            details={proof.cache: proof.reason for proof in refused},
        )

    def rows(self) -> tuple[ExplainRow, ...]:
        return tuple(
            ExplainRow(
                cache=proof.cache,
                node=proof.after.node,
                form=proof.after.form,
                run=str(proof.after.run or ""),
                verdict="proved" if proof.ok else "refused",
                reason=proof.reason,
            )
            for proof in self.caches
        )


def prove_program(
    before: ExportedProgram,
    after: ExportedProgram,
    caches: Mapping[str, CacheDecl],
    profiles: Sequence[OptimizationProfile] = (),
) -> ProofReport:
    """Prove every cache of `before` and of its lowered form `after`.

    `caches` maps the name a cache has outside (`k_cache.0`) to where it is in both programs. `profiles` are the shapes the
    engine will be asked for: none may be longer than a cache.
    """
    name_of = {decl.target: name for name, decl in caches.items()}
    if shared := shared_memory(before, name_of):  # torch cannot make such a program functional, so this is asked first
        clashes = {name_of[target]: name_of.get(other, other) for target, other in shared.items()}
        return ProofReport(tuple(_unread(name, caches[name].target, clashes) for name in caches))
    first = prove_writes(read_program(before, caches), profiles)
    second = prove_writes(read_program(after, caches), profiles)
    return ProofReport(tuple(CacheProof(first[name], second[name]) for name in caches))


def _unread(name: str, target: str, clashes: Mapping[str, str]) -> CacheProof:
    verdict: Verdict = Unknown("not read, since caches of this program share memory", target)
    if name in clashes:
        verdict = Refuted(f"{name} and {clashes[name]} are the same memory", target)
    proof = WriteProof(name, target, "none", verdict, "", ())
    return CacheProof(proof, proof)


def prove_writes(program: Program, profiles: Sequence[OptimizationProfile] = ()) -> dict[str, WriteProof]:
    """The verdict on every cache of one functional program: the cells, then what else in-place writing would change."""
    values = Values(program)
    writes = {name: read_write(values, name, cache) for name, cache in program.caches.items()}
    runs = {name: write.verdict.run for name, write in writes.items() if isinstance(write.verdict, Proved)}
    readers = find_readers(writes)
    proofs = {}
    for name, write in writes.items():
        verdict = write.verdict
        if name in runs:
            verdict = _objection(program, values, name, write, runs, readers, profiles) or verdict
        proofs[name] = WriteProof(
            cache=name,
            node=write.node.name,
            form=write.form,
            verdict=verdict,
            update="" if write.update is None else write.update.name,
            update_axes=write.update_axes,
        )
    return proofs


def _objection(
    program: Program,
    values: Values,
    name: str,
    write: Write,
    runs: Mapping[str, Run],
    readers: Readers,
    profiles: Sequence[OptimizationProfile],
) -> Verdict | None:
    cache = program.caches[name]
    assert write.update is not None
    return (
        find_hazard(program, name, cache, write)
        or find_overrun(program, values, cache, runs[name], write.node.name, profiles)
        or find_inconsistency(program, values, runs, readers, name)
        or find_wrong_positions(program, values, write.update, runs[name])
    )
