"""The manifest: which run a directory holds, and which plan may continue it."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.inputs.verifier import Verifier
from spec_compat.pipeline.rows.index import Index
from spec_compat.pipeline.run import config, fingerprints, manifest, plan
from spec_compat.pipeline.run.layout import STAGES, Layout, Stage
from spec_compat.pipeline.run.manifest import Manifest, StageRecord
from spec_compat.pipeline.system import atomic
from tests.unit.pipeline_inputs import TURNS, make_data, make_verifier, weights


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_verifier(tmp_path / "model")
    make_data(tmp_path / "d.jsonl")
    return tmp_path


def planned(root: Path, **flags: Any) -> plan.Plan:
    given = {"model": str(root / "model"), "data": [str(root / "d.jsonl")], "output": root / "run"}
    return plan.make(config.load({**given, **flags}))


def test_a_manifest_is_read_back(root: Path) -> None:
    begun = manifest.begin(planned(root))
    begun.stages["prepare"] = StageRecord(
        inputs={"a": "i"}, started=manifest.now(), counts={"rows": 3}
    )
    (root / "run").mkdir()
    begun.save(Layout(root / "run"))
    assert manifest.find(root / "run") == begun
    assert [path.name for path in (root / "run").iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    ("flags", "stage", "says"),
    [
        ({"seed": 1}, "prepare", "--seed is 0, not 1"),
        ({"seq_length": 100}, "prepare", "--seq-length is 511, not 100"),
        ({"layer_ids": "1,4,5,7"}, "extract", "--layer-ids is 2,4,5,7, not 1,4,5,7"),
        ({"draft_vocab_size": 64}, "map", "--draft-vocab-size is 512, not 64"),
        ({"lr": 0.5, "seed": 1}, "prepare", "--seed is 0, not 1"),
        ({"lr": 0.5}, "train", "--lr is 0.0001, not 0.5"),
        ({"verifier_name": "org/name"}, "train", "--verifier-name is None, not org/name"),
    ],
)
def test_another_run_is_refused_by_its_first_difference(
    root: Path, flags: dict[str, Any], stage: Stage, says: str
) -> None:
    begun, other = manifest.begin(planned(root)), planned(root, **flags)
    with pytest.raises(UserError) as caught:
        manifest.refuse_another_run(begun, other, first=None)
    assert says in str(caught.value)
    assert f"--from {stage}" in str(caught.value)
    manifest.refuse_another_run(begun, other, first=stage)
    for later in STAGES[STAGES.index(stage) + 1 : -1]:
        with pytest.raises(UserError):
            manifest.refuse_another_run(begun, other, first=later)


@pytest.mark.parametrize(
    "flags", [{"sink_buffers": 2}, {"num_workers": 0}, {"tensor_parallel_size": 2}]
)
def test_options_that_change_no_result_may_change(root: Path, flags: dict[str, Any]) -> None:
    manifest.refuse_another_run(manifest.begin(planned(root)), planned(root, **flags), None)


def test_other_content_under_the_same_path_is_done_again_and_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_altered_rows", lambda *_: None)
    begun, layout = all_done(root), Layout(root / "run")
    (root / "model" / "model.safetensors").write_bytes(weights(b"other"))
    made = planned(root)
    manifest.refuse_another_run(begun, made, None)
    assert manifest.fault(begun, made, layout, "prepare") is None
    assert "model has changed" in str(manifest.fault(begun, made, layout, "extract"))
    make_data(root / "d.jsonl", rows=4)
    made = planned(root)
    manifest.refuse_another_run(begun, made, None)
    assert "data d has changed" in str(manifest.fault(begun, made, layout, "prepare"))


def test_other_data_is_another_run(root: Path) -> None:
    begun = manifest.begin(planned(root))
    make_data(root / "e.jsonl", rows=4)
    with pytest.raises(UserError, match=rf"--data is {root}/d.jsonl, not {root}/e.jsonl"):
        manifest.refuse_another_run(begun, planned(root, data=[str(root / "e.jsonl")]), None)


def test_another_model_is_named(root: Path) -> None:
    begun = manifest.begin(planned(root))
    other = make_verifier(root / "other", hidden_size=128)
    with pytest.raises(UserError, match=rf"--model is {root}/model, not {root}/other"):
        manifest.refuse_another_run(begun, planned(root, model=str(other)), None)


def test_a_moved_model_is_the_same_run(root: Path) -> None:
    begun = manifest.begin(planned(root))
    moved = (root / "model").rename(root / "moved")
    manifest.refuse_another_run(begun, planned(root, model=str(moved)), None)


def test_a_run_whose_manifest_has_max_disk_as_text_is_continued(root: Path) -> None:
    begun = manifest.begin(planned(root))
    begun.options["max_disk"] = "500GB"
    options = config.load({}, earlier=begun.options)
    assert options.max_disk == 500 * 10**9
    manifest.refuse_another_run(begun, plan.make(options), None)


def test_inputs_change_with_the_options_of_the_stage_and_what_came_before(root: Path) -> None:
    begun = manifest.begin(planned(root))
    begun.stages["prepare"] = StageRecord(inputs={}, started="", digest="one")
    before = manifest.inputs(begun, planned(root), "extract")
    assert manifest.inputs(begun, planned(root, lr=0.5), "extract") == before
    assert manifest.inputs(begun, planned(root, layer_ids="1,4,5,7"), "extract") != before
    begun.stages["prepare"].digest = "two"
    assert manifest.inputs(begun, planned(root), "extract") != before


def finished(root: Path, **flags: Any) -> tuple[Manifest, plan.Plan, Layout]:
    """A run that is prepared."""
    made, layout = planned(root, **flags), Layout(root / "run")
    file = layout.prepared("d") / "data.arrow"
    file.parent.mkdir(parents=True)
    file.write_text("rows")
    begun, name = manifest.begin(made), layout.relative(file)
    stamp = atomic.Stamp.of(file)
    assert stamp is not None
    begun.stages["prepare"] = StageRecord(
        inputs=manifest.inputs(begun, made, "prepare"),
        started="",
        finished="",
        digest="rows",
        outputs={name: atomic.sha256(file)},
        stamps={name: stamp},
    )
    return begun, made, layout


def test_what_is_done_is_not_done_again(root: Path) -> None:
    begun, made, layout = finished(root)
    assert manifest.fault(begun, made, layout, "prepare") is None
    assert manifest.fault(begun, made, layout, "extract") == ""
    os.utime(layout.prepared("d") / "data.arrow")
    assert manifest.fault(begun, made, layout, "prepare") is None


def test_what_was_begun_and_not_finished_is_gone_on_with(root: Path) -> None:
    begun, made, layout = finished(root)
    begun.stages["prepare"].finished = None
    assert manifest.fault(begun, made, layout, "prepare") == ""


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer.json", "{}", "the tokenizer has changed"),
        ("tokenizer_config.json", '{"chat_template": "other"}', "the chat template has changed"),
        ("chat_template.jinja", "{{ messages }}", "the chat template has changed"),
    ],
)
def test_a_changed_file_of_the_verifier_is_named(
    root: Path, name: str, content: str, says: str
) -> None:
    begun, _, layout = finished(root)
    (root / "model" / name).write_text(content)
    assert manifest.fault(begun, planned(root), layout, "prepare") == says


def test_another_release_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_SPECULATORS", "0.3.0")
    begun, made, layout = finished(root)
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_SPECULATORS", "0.4.0")
    reason = manifest.fault(begun, made, layout, "prepare")
    assert reason == "speculators was 0.3.0, is 0.4.0"


def test_the_packages_that_make_tokens_count(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "_release", lambda name: f"of {name}")
    found = fingerprints.of("prepare", Verifier(str(root / "model")))
    for name in ("speculators", "transformers", "tokenizers"):
        assert found[name] == f"of {name}"


def test_the_files_of_a_download_may_come_later(root: Path) -> None:
    """They are those of its commit."""
    place = root / "models--org--m" / "snapshots" / ("0" * 40)
    make_verifier(place)
    before = fingerprints.of("prepare", Verifier(str(place)))
    (place / "tokenizer.json").write_text("{}")
    assert fingerprints.of("prepare", Verifier(str(place))) == before


def all_done(root: Path) -> Manifest:
    """As if every stage had been run."""
    made = planned(root)
    begun = manifest.begin(made)
    for stage in STAGES:
        inputs = manifest.inputs(begun, made, stage)
        begun.stages[stage] = StageRecord(
            inputs=inputs, started="", finished="", digest=stage, counts={"rows": 0}
        )
    return begun


def rewrite(name: str, content: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def change(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (root / name).write_text(content)

    return change


def release(name: str, number: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    return lambda root, patch: patch.setenv(f"SPEC_COMPAT_ASSUME_{name.upper()}", number)


def without_patch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_COMPAT_DISABLE", "train/resume")


def touch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (root / "model", *(root / "model").iterdir(), root / "d.jsonl"):
        os.utime(file, (1, 1))


def larger_vocabulary(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_verifier(root / "model", vocab_size=600)


def own_code(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a class that transformers has too: which is taken depends on --trust-remote-code."""
    make_verifier(root / "model", auto_map={"AutoConfig": "configuration_llama.LlamaConfig"})


def copy_model(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(root / "model", root / "copy")
    shutil.rmtree(root / "model")
    shutil.copytree(root / "copy", root / "model")


TOKENIZER, TEMPLATE = "the tokenizer has changed", "the chat template has changed"


@pytest.mark.parametrize(
    ("change", "flags", "again"),
    [
        (
            rewrite("d.jsonl", json.dumps({"conversations": TURNS})),
            {},
            {"prepare": "data d has changed"},
        ),
        (
            rewrite("model/model.safetensors", weights(b"other").decode()),
            {},
            {"extract": "model has changed", "train": "model has changed"},
        ),
        (rewrite("model/tokenizer.json", "{}"), {}, {"prepare": TOKENIZER, "map": TOKENIZER}),
        (rewrite("model/vocab.txt", "a"), {}, {"prepare": TOKENIZER, "map": TOKENIZER}),
        (rewrite("model/x.tiktoken", "a"), {}, {"prepare": TOKENIZER, "map": TOKENIZER}),
        (rewrite("model/tool_declaration_ts.py", ""), {}, {"prepare": TOKENIZER, "map": TOKENIZER}),
        (rewrite("model/chat_template.jinja", "x"), {}, {"prepare": TEMPLATE}),
        (rewrite("model/README.md", "x"), {}, {}),
        (
            larger_vocabulary,
            {"draft_vocab_size": 512},
            {
                "extract": "model has changed",
                "map": "the verifier's vocabulary was 512, is 600",
                "train": "model has changed",
            },
        ),
        (touch, {"trust_remote_code": True}, {}),
        (
            own_code,
            {"trust_remote_code": True},
            {
                "prepare": "--trust-remote-code was false, is true",
                "map": "--trust-remote-code was false, is true",
                "extract": "model has changed",
                "train": "model has changed",
            },
        ),
        (
            release("speculators", "0.4.0"),
            {},
            dict.fromkeys(
                ("prepare", "extract", "map", "train"), "speculators was 0.3.0, is 0.4.0"
            ),
        ),
        (release("vllm", "0.17.1"), {}, {"extract": "vllm was 0.16.0, is 0.17.1"}),
        (without_patch, {}, {"train": "the patch train/resume has changed"}),
        (touch, {}, {}),
        (copy_model, {}, {}),
        (touch, {"seed": 7}, {"prepare": "--seed was 0, is 7"}),
        (touch, {"layer_ids": "1,4,5,7"}, {"extract": "was [2, 4, 5, 7], is [1, 4, 5, 7]"}),
        (touch, {"draft_vocab_size": 64}, {"map": "--draft-vocab-size was 512, is 64"}),
        (touch, {"epochs": 3}, {"train": "--epochs was 20, is 3"}),
        (touch, {"verifier_name": "a/b"}, {"export": "--verifier-name has changed"}),
        (touch, {"sink_buffers": 3, "num_workers": 0, "max_disk": "1TB"}, {}),
    ],
)
def test_a_change_redoes_what_depends_on_it_and_says_why(
    change: Callable[[Path, pytest.MonkeyPatch], None],
    flags: dict[str, Any],
    again: dict[str, str],
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_VLLM", "0.16.0")
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_SPECULATORS", "0.3.0")
    monkeypatch.setattr(manifest, "_altered_rows", lambda *_: None)
    begun = all_done(root)
    change(root, monkeypatch)
    made, layout = planned(root, **flags), Layout(root / "run")
    found = {stage: manifest.fault(begun, made, layout, stage) for stage in STAGES}
    assert {stage for stage, reason in found.items() if reason is not None} == again.keys()
    for stage, reason in again.items():
        assert reason in str(found[stage])  # type: ignore[index]


def test_an_option_that_is_new_in_a_release_leaves_a_run_as_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_altered_rows", lambda *_: None)
    begun, layout = all_done(root), Layout(root / "run")
    del begun.options["storage"], begun.stages["extract"].inputs["--storage"]
    manifest.refuse_another_run(begun, planned(root), None)
    assert manifest.fault(begun, planned(root), layout, "extract") is None
    other = planned(root, storage="shards")
    with pytest.raises(UserError, match="--storage is rows, not shards"):
        manifest.refuse_another_run(begun, other, None)
    assert "--storage was" in str(manifest.fault(begun, other, layout, "extract"))


def test_a_moved_model_is_named_anew_in_the_head_alone(root: Path) -> None:
    begun = all_done(root)
    moved = (root / "model").rename(root / "moved")
    made, layout = planned(root, model=str(moved)), Layout(root / "run")
    found = {stage: manifest.fault(begun, made, layout, stage) for stage in STAGES}
    assert found.pop("export") == "--verifier-name has changed"
    assert set(found.values()) == {None}


@pytest.mark.parametrize(
    ("stage", "readers"),
    [
        ("prepare", {"extract", "map"}),
        ("extract", {"train"}),
        ("map", {"train"}),
        ("train", {"export"}),
        ("export", set()),
    ],
)
def test_another_result_of_a_stage_redoes_those_that_read_it(
    root: Path, stage: Stage, readers: set[str]
) -> None:
    begun, made, layout = all_done(root), planned(root), Layout(root / "run")
    begun.stages[stage].digest = "other"
    reasons = {later: manifest.fault(begun, made, layout, later) or "" for later in STAGES}
    said = f"the result of {stage} was {stage}, is other"
    assert {later for later, reason in reasons.items() if reason == said} == readers


def test_an_altered_or_missing_file_is_named(root: Path) -> None:
    begun, made, layout = finished(root)
    file = layout.prepared("d") / "data.arrow"
    file.write_text("ROWS")
    assert manifest.fault(begun, made, layout, "prepare") == (
        "prepared/d/data.arrow has been altered"
    )
    file.unlink()
    assert manifest.fault(begun, made, layout, "prepare") == "prepared/d/data.arrow is missing"


def test_what_is_altered_is_not_gone_on_with(root: Path) -> None:
    """A stage that keeps what is there would record it as its own."""
    begun, _, layout = finished(root)
    record, file = begun.stages["prepare"], layout.prepared("d") / "data.arrow"
    manifest.drop_altered(record, layout)
    assert file.exists()
    (layout.prepared("d") / "kept").touch()
    outside = root / "outside"
    outside.touch()
    record.outputs |= {"../outside": "0", str(outside): "0", "prepared/d/gone": "0"}
    file.write_text("ROWS")
    manifest.drop_altered(record, layout)
    assert outside.exists()
    assert [there.name for there in file.parent.iterdir()] == ["kept"]


def test_rows_that_the_index_has_lost_are_missed(root: Path) -> None:
    made, layout = planned(root), Layout(root / "run")
    layout.rows("d").mkdir(parents=True)
    index = Index(layout.rows("d"))
    file = layout.rows("d") / "data_0.pt"
    file.write_text("states")
    index.add(file.name, atomic.sha256(file), {0: 3})
    record = StageRecord(inputs={}, started="", counts={"rows": 1})
    assert manifest._altered_rows(made, layout, record) is None
    more = record.model_copy(update={"counts": {"rows": 2}})
    assert manifest._altered_rows(made, layout, more) == "1 of 2 rows are in the index"
    file.write_text("STATES!")
    assert manifest._altered_rows(made, layout, record) == "gen/d/data_0.pt: it has 7 bytes, not 6"


def test_a_list_of_shards_that_the_run_did_not_write_is_found(root: Path) -> None:
    """The trainer would read the shards that it names."""
    made, layout = planned(root), Layout(root / "run")
    layout.rows("d").mkdir(parents=True)
    (layout.rows("d") / "index.json").write_text('{"rows": {"0": "shard_0.safetensors"}}')
    record = StageRecord(inputs={}, started="", counts={"rows": 0})
    reason = manifest._altered_rows(made, layout, record)
    assert reason == "gen/d/index.json is not of this run"
    record.outputs["gen/d/index.json"] = "0"
    assert manifest._altered_rows(made, layout, record) is None


def test_what_patches_share_counts_too() -> None:
    """The sink writes the rows, and is no patch by itself."""
    assert "the patch extract/sink" in fingerprints._patches("extract")
    assert "the patch extract/wrappers" in fingerprints._patches("extract")
    assert "the patch train/wrappers" in fingerprints._patches("train")
    assert "the patch map/wrappers" not in fingerprints._patches("map")


def test_a_name_of_a_file_counts(tmp_path: Path) -> None:
    digests = set()
    for name in ("a.model", "b.model"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("the same")
        digests.add(fingerprints._digest(Verifier(str(tmp_path / name)), ["*.model"]))
    assert len(digests) == 2


def test_the_code_of_a_patch_counts_and_its_words_do_not(tmp_path: Path) -> None:
    file = tmp_path / "p.py"
    digests = []
    for text in ('"""A."""\nx = 1\n', '"""B."""\n# why\nx = 1\n', '"""A."""\nx = 2\n'):
        file.write_text(text)
        digests.append(fingerprints._code(file))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("content", ["", "[]", '{"a": 1}', "\xff"])
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="not the manifest of a run"):
        manifest.find(tmp_path)


def test_an_altered_manifest_is_refused(root: Path) -> None:
    (root / "run").mkdir()
    manifest.begin(planned(root)).save(Layout(root / "run"))
    file = root / "run" / "manifest.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(UserError, match="altered since it was written; restore it"):
        manifest.find(root / "run")


@pytest.mark.parametrize(
    "new", [{"schema_version": 2, "sources": []}, {"options": {"not_yet_thought_of": 1}}]
)
def test_a_manifest_of_a_newer_release_is_refused_by_that_release(
    new: dict[str, Any], tmp_path: Path
) -> None:
    content = {"schema_version": 1, "spec_compat": "9.9", "options": {}, **new}
    content["checksum"] = manifest.digest_of(content)
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"written by spec-compat 9\.9, which .* cannot read"):
        manifest.find(tmp_path)


def test_a_directory_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="not empty, and not the directory of a run"):
        manifest.find(tmp_path)


def test_a_file_in_the_place_of_the_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match="this is a file"):
        manifest.find(tmp_path / "run")
    with pytest.raises(UserError, match="cannot be written"):
        manifest.find(tmp_path / "run" / "below")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "run")
    with (
        manifest.locked(layout),
        pytest.raises(UserError, match="another process"),
        manifest.locked(layout),
    ):
        pass
    with manifest.locked(layout):
        assert manifest.find(layout.root) is None


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EAGAIN, "another process works on this run"),
        (errno.ENOLCK, "its file system has no locks (no locks available)"),
        (errno.EOPNOTSUPP, "its file system has no locks (operation not supported)"),
    ],
)
def test_a_file_system_without_locks_is_no_second_run(
    number: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(stream: object, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(manifest.fcntl, "flock", flock)
    with pytest.raises(UserError) as caught, manifest.locked(Layout(tmp_path / "run")):
        pass
    assert says in str(caught.value)


def test_a_stage_is_cleared_without_touching_the_others(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    for stage in STAGES:
        for path in layout.outputs(stage):
            path.parent.mkdir(exist_ok=True)
            path.mkdir() if not path.suffix else path.touch()
    layout.clear("train")
    layout.clear("train")
    assert not layout.checkpoints.exists()
    assert not layout.metrics.exists()
    assert layout.gen.exists()
    assert layout.head.exists()


def test_the_rows_of_a_dataset_stay_when_another_is_added_or_goes(root: Path) -> None:
    begun, made, layout = all_done(root), planned(root), Layout(root / "run")
    prepare, extract = begun.stages["prepare"], begun.stages["extract"]
    extract.parts = {"a": "1", "b": "2", "c": "3"}
    prepare.parts, prepare.digest = {"a": "1", "b": "other", "d": "4"}, "other"
    now = manifest.inputs(begun, made, "extract")
    kept = manifest.kept(begun, "extract", now)
    assert kept == {"a"}
    for name in "abc":
        layout.rows(name).mkdir(parents=True)
    layout.clear("extract", keep=kept)
    assert [path.name for path in layout.gen.iterdir()] == ["a"]
    assert not manifest.kept(begun, "train", now)
    assert not manifest.kept(begun, "extract", {**now, "model": "other"})
    layout.clear("extract")
    assert not layout.gen.exists()


@pytest.mark.parametrize("stage", ["extract", "map", "train", "export"])
def test_what_was_put_on_another_disk_stays_there(stage: Stage, tmp_path: Path) -> None:
    layout = Layout(tmp_path / "run")
    place, elsewhere = layout.outputs(stage)[0], tmp_path / "elsewhere"
    (elsewhere / "d").mkdir(parents=True)
    (elsewhere / "file").touch()
    place.parent.mkdir()
    place.symlink_to(elsewhere)
    layout.clear(stage)
    assert place.is_symlink()
    assert not list(elsewhere.iterdir())
    with atomic.replacing_directory(place) as directory:
        (directory / "new").touch()
    assert place.is_symlink()
    assert [file.name for file in elsewhere.iterdir()] == ["new"]


def test_the_manifest_is_json_for_others(root: Path) -> None:
    content = json.loads(manifest.begin(planned(root)).model_dump_json())
    assert content["options"]["layer_ids"] == [2, 4, 5, 7]
    assert Manifest.model_validate(content)
