"""The order of a build, and that a failure anywhere leaves nothing but the model behind. The backend is the test's own."""

import dataclasses
import json

import pytest

from compiler_service import pipeline
from compiler_service.backends.backend import BuiltEngine
from compiler_service.backends.inductor import backend as inductor
from compiler_service.ingest.digest import DigestCache
from compiler_service.pipeline import Stage, Workspace, build, explain
from compiler_service.spec import CompileSpec, profile_set
from shared.artifacts.local import LocalStore
from shared.bindings import AliasedBinding, pool_name
from shared.errors import BuildFailed, Cancelled, FieldOutOfRange, SourceInvalid, WriteNotProven
from shared.kv_spec import KVCacheSpec, Layout
from shared.manifest import decode_engine_manifest
from shared.profiles import ProfileSet
from tests.support.sources import edit_json, write_checkpoint

STAGES = [Stage.FETCH, Stage.LOAD, Stage.EXPORT, Stage.LOWER, Stage.PROVE, Stage.BUILD, Stage.VERIFY, Stage.PUBLISH]


class Bench:
    """A store with one tiny checkpoint beside it, and a record of what a build said and called."""

    def __init__(self, root):
        self.workspace = Workspace(LocalStore(root / "store"), DigestCache(root / "digests"), (root / "models",))
        self.source = root / "models" / "tiny"
        self.stages, self.built, self.asked = [], 0, 0
        write_checkpoint(self.source)

    def spec(self, **changes):
        spec = CompileSpec(
            source="tiny",
            backend="inductor",
            layout=Layout.PAGED,
            dtype="float32",
            max_len=64,
            page_size=8,
            profiles=profile_set(("decode=4x1", "prefill=3x16")),
            targets=("cpu",),
            allow_copying=False,
            constant_weights=False,
        )
        return dataclasses.replace(spec, **changes)

    def progress(self, stage, fraction, message):
        assert 0.0 <= fraction <= 1.0
        if stage not in self.stages[-1:]:
            self.stages.append(stage)

    def before_publish(self):
        self.asked += 1

    def run(self, **changes):
        self.stages = []
        return build(self.spec(**changes), self.workspace, self.progress, self.before_publish)

    def kinds(self):
        return sorted(info.kind for info in self.workspace.store.list())


@pytest.fixture(scope="module")
def export_once():
    """The real export, lowering and proof, each done once for each decoder: they are pure, and slow."""
    done = {}

    def once(function):
        def call(*arguments, **options):
            key = (function.__name__, *(repr(a) if isinstance(a, ProfileSet | KVCacheSpec) else id(a) for a in arguments[-2:]))
            if key not in done:
                # The arguments are kept too, so that no other object can get their ids.
                done[key] = (function(*arguments, **options), arguments)
            return done[key][0]

        return call

    seams = {"export_decoder": pipeline, "lower_to_linear": inductor, "prove_decoder": pipeline}
    return {(module, name): once(getattr(module, name)) for name, module in seams.items()}


@pytest.fixture
def bench(tmp_path, monkeypatch, export_once):
    made = Bench(tmp_path)
    for (module, name), function in export_once.items():
        monkeypatch.setattr(module, name, function)

    def build_engine(program, target, directory):
        made.built += 1
        (directory / "engine.bin").write_bytes(b"code")
        aliases = tuple(AliasedBinding(pool_name(i), pool_name(i)) for i in range(program.cache.num_layers))
        return BuiltEngine(directory, target.manifest_target, {"torch": "x"}, (), aliases, dict(program.weights))

    monkeypatch.setattr(inductor, "build_engine", build_engine)
    monkeypatch.setattr(inductor, "verify_engine", lambda built, exported, weights: None)
    return made


def test_a_build_goes_through_every_stage_in_order(bench):
    result = bench.run()
    assert (bench.stages, bench.asked, result.reused) == (STAGES, 1, False)
    manifest = decode_engine_manifest(bench.workspace.store.manifest(result.artifact_id))
    assert [c.cache for c in manifest.proof] == ["k_cache.0", "v_cache.0", "k_cache.1", "v_cache.1"]
    assert all(c.aliased and c.verdict_before == c.verdict_after == "proved" for c in manifest.proof)
    assert manifest.cache.page_size == 8
    assert bench.workspace.store.contains(manifest.model.model_id)


def test_the_second_time_nothing_is_built_or_asked(bench):
    first, again = bench.run(), bench.run()
    assert (again.artifact_id, again.reused) == (first.artifact_id, True)
    assert (bench.built, bench.asked) == (1, 1)
    assert Stage.BUILD not in bench.stages


def test_the_key_is_known_without_building(bench):
    key = pipeline.key(bench.spec(), bench.workspace, bench.progress)
    assert (bench.built, bench.kinds(), bench.stages[-1]) == (0, ["model"], Stage.PROVE)
    assert bench.run().artifact_id == key.artifact_id


def test_a_damaged_engine_is_built_again(bench):
    first = bench.run()
    with bench.workspace.store.open(first.artifact_id) as handle:
        path = handle.path("engine.bin")
    path.chmod(0o644)
    path.write_bytes(b"cod!")
    again = bench.run()
    assert (again.artifact_id, again.reused, bench.built) == (first.artifact_id, False, 2)
    bench.workspace.store.verify(first.artifact_id)


def test_engines_of_one_model_share_its_component(bench):
    paged, linear = bench.run(), bench.run(layout=Layout.LINEAR, page_size=64)
    assert paged.artifact_id != linear.artifact_id
    assert bench.kinds() == ["engine", "engine", "model"]


@pytest.mark.parametrize(
    ("module", "target", "error"),
    [
        (inductor, "build_engine", BuildFailed("no")),
        (inductor, "verify_engine", BuildFailed("no")),
        (pipeline, "certify", BuildFailed("no")),
        (inductor, "lower_to_pools", WriteNotProven("no")),
    ],
)
def test_a_failure_publishes_no_engine(bench, monkeypatch, module, target, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(module, target, fail)
    with pytest.raises(type(error)):
        bench.run()
    assert (bench.kinds(), bench.asked) == (["model"], 0)


def test_who_is_refused_at_the_last_moment_publishes_nothing(bench):
    def refuse():
        raise Cancelled("too late")

    bench.before_publish = refuse
    with pytest.raises(Cancelled):
        bench.run()
    assert bench.kinds() == ["model"]


def test_a_write_that_is_not_proven_stops_before_the_backend(bench, monkeypatch):
    real = pipeline.prove_decoder

    def doubt(exported, lowered):
        report = real(exported, lowered)
        first, *others = report.caches
        doubtful = dataclasses.replace(first, after=dataclasses.replace(first.after, verdict="unknown: a test"))
        return dataclasses.replace(report, caches=(doubtful, *others))

    monkeypatch.setattr(pipeline, "prove_decoder", doubt)
    with pytest.raises(WriteNotProven, match=r"k_cache\.0: after lowering: unknown: a test"):
        bench.run()
    assert bench.built == 0
    certificates = explain(bench.spec(), bench.workspace, bench.progress)
    assert [bool(c.reason) for c in certificates] == [True, False, False, False]


def test_an_explanation_builds_and_stores_nothing(bench):
    certificates = explain(bench.spec(), bench.workspace, bench.progress)
    assert [c.verdict_after for c in certificates] == ["proved"] * 4
    assert not any(c.aliased or c.binding for c in certificates)
    assert (bench.kinds(), bench.built) == ([], 0)


@pytest.mark.parametrize("run", [lambda b: b.run(), lambda b: explain(b.spec(), b.workspace, b.progress)], ids=["build", "explain"])
def test_a_bad_source_stops_both_at_once(bench, run):
    edit_json(bench.source / "config.json", num_hidden_layers=3)
    with pytest.raises(SourceInvalid, match="num_hidden_layers is 3"):
        run(bench)
    assert bench.kinds() == []


def test_sources_are_confined(bench, tmp_path):
    (tmp_path / "outside").mkdir()
    with pytest.raises(FieldOutOfRange):
        bench.run(source=str(tmp_path / "outside"))


def test_the_dtype_reaches_weights_and_cache(bench):
    result = bench.run(dtype="bfloat16")
    manifest = json.loads(bench.workspace.store.manifest(result.artifact_id))
    assert (manifest["model"]["weights_dtype"], manifest["cache"]["groups"][0]["dtype"]) == ("bfloat16", "bfloat16")
