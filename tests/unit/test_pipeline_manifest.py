"""The manifest: which run a directory holds, and which plan may continue it."""

import errno
import importlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from spec_compat.errors import UserError
from spec_compat.pipeline.rows.index import Index
from spec_compat.pipeline.run import config, fingerprints, lock, manifest, plan, staleness
from spec_compat.pipeline.run.layout import Layout
from spec_compat.pipeline.run.lock import locked
from spec_compat.pipeline.run.manifest import Manifest, StageRecord
from spec_compat.pipeline.run.stage import Stage
from spec_compat.pipeline.stages import EXTRACT, PREPARE, STAGES, TRAIN
from spec_compat.pipeline.system import atomic
from tests.unit.pipeline_inputs import (
    MADE,
    PREPARED,
    TURNS,
    Notes,
    make_data,
    make_verifier,
    weights,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_verifier(tmp_path / "model")
    make_data(tmp_path / "d.jsonl")
    return tmp_path


def planned(root: Path, **flags: Any) -> plan.Plan:
    given = {"model": str(root / "model"), "data": [str(root / "d.jsonl")], "output": root / "run"}
    return plan.make(config.load({**given, **flags}))


ROOT = Path(__file__).parents[2]
BY_NAME = {stage.name: stage for stage in STAGES}


def reason(begun: Manifest, made: plan.Plan, stage: str) -> str | None:
    """Why the stage must be done, empty when it never was; None when it need not be."""
    due = staleness.due(begun, made, BY_NAME[stage])
    return None if due is None else due.reason


def reasons(begun: Manifest, made: plan.Plan) -> dict[str, str]:
    """Of the stages that must be done."""
    found = {stage.name: reason(begun, made, stage.name) for stage in STAGES}
    return {name: why for name, why in found.items() if why is not None}


def test_a_manifest_is_read_back(root: Path) -> None:
    begun = all_done(root)
    (root / "run").mkdir()
    begun.save(Layout(root / "run"))
    found = manifest.find(root / "run", STAGES)
    assert found == begun
    assert found is not None
    assert found.result(TRAIN) == MADE["train"]
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
    root: Path, flags: dict[str, Any], stage: str, says: str
) -> None:
    begun, other = manifest.begin(planned(root)), planned(root, **flags)
    with pytest.raises(UserError) as caught:
        staleness.refuse_another_run(begun, other, STAGES, first=None)
    assert says in str(caught.value)
    assert f"--from {stage}" in str(caught.value)
    staleness.refuse_another_run(begun, other, STAGES, first=BY_NAME[stage])
    for later in STAGES[STAGES.index(BY_NAME[stage]) + 1 : -1]:
        with pytest.raises(UserError):
            staleness.refuse_another_run(begun, other, STAGES, first=later)


@pytest.mark.parametrize(
    "flags", [{"sink_buffers": 2}, {"num_workers": 0}, {"tensor_parallel_size": 2}]
)
def test_options_that_change_no_result_may_change(root: Path, flags: dict[str, Any]) -> None:
    staleness.refuse_another_run(
        manifest.begin(planned(root)), planned(root, **flags), STAGES, None
    )


def test_other_content_under_the_same_path_is_done_again_and_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = all_done(root)
    (root / "model" / "model.safetensors").write_bytes(weights(b"other"))
    made = planned(root)
    staleness.refuse_another_run(begun, made, STAGES, None)
    assert reason(begun, made, "prepare") is None
    assert "model has changed" in str(reason(begun, made, "extract"))
    make_data(root / "d.jsonl", rows=4)
    made = planned(root)
    staleness.refuse_another_run(begun, made, STAGES, None)
    assert "data d has changed" in str(reason(begun, made, "prepare"))


def test_other_data_is_another_run(root: Path) -> None:
    begun = manifest.begin(planned(root))
    make_data(root / "e.jsonl", rows=4)
    with pytest.raises(UserError, match=rf"--data is {root}/d.jsonl, not {root}/e.jsonl"):
        staleness.refuse_another_run(
            begun, planned(root, data=[str(root / "e.jsonl")]), STAGES, None
        )


def test_another_model_is_named(root: Path) -> None:
    begun = manifest.begin(planned(root))
    other = make_verifier(root / "other", hidden_size=128)
    with pytest.raises(UserError, match=rf"--model is {root}/model, not {root}/other"):
        staleness.refuse_another_run(begun, planned(root, model=str(other)), STAGES, None)


def test_a_moved_model_is_the_same_run(root: Path) -> None:
    begun = manifest.begin(planned(root))
    moved = (root / "model").rename(root / "moved")
    staleness.refuse_another_run(begun, planned(root, model=str(moved)), STAGES, None)


def test_a_run_whose_manifest_has_max_disk_as_text_is_continued(root: Path) -> None:
    begun = manifest.begin(planned(root))
    begun.options["max_disk"] = "500GB"
    options = config.load({}, earlier=begun.options)
    assert options.max_disk == 500 * 10**9
    staleness.refuse_another_run(begun, plan.make(options), STAGES, None)


def test_inputs_change_with_the_options_of_the_stage_and_what_came_before(root: Path) -> None:
    begun = manifest.begin(planned(root))
    begun.stages["prepare"] = StageRecord(inputs={}, started="", digest="one")
    before = staleness.inputs(begun, planned(root), EXTRACT)
    assert staleness.inputs(begun, planned(root, lr=0.5), EXTRACT) == before
    assert staleness.inputs(begun, planned(root, layer_ids="1,4,5,7"), EXTRACT) != before
    begun.stages["prepare"].digest = "two"
    assert staleness.inputs(begun, planned(root), EXTRACT) != before


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
        inputs=staleness.inputs(begun, made, PREPARE),
        started="",
        finished="",
        digest="rows",
        result=PREPARED.model_copy(update={"outputs": {name: atomic.sha256(file)}}),
        stamps={name: stamp},
    )
    return begun, made, layout


def test_what_is_done_is_not_done_again(root: Path) -> None:
    begun, made, layout = finished(root)
    assert reason(begun, made, "prepare") is None
    assert reason(begun, made, "extract") == ""
    os.utime(layout.prepared("d") / "data.arrow")
    assert reason(begun, made, "prepare") is None


def test_what_was_begun_and_not_finished_is_gone_on_with(root: Path) -> None:
    begun, made, _ = finished(root)
    begun.stages["prepare"].finished = None
    assert reason(begun, made, "prepare") == ""


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
    begun, _, _ = finished(root)
    (root / "model" / name).write_text(content)
    assert reason(begun, planned(root), "prepare") == says


def test_another_release_is_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_SPECULATORS", "0.3.0")
    begun, made, _ = finished(root)
    monkeypatch.setenv("SPEC_COMPAT_ASSUME_SPECULATORS", "0.4.0")
    why = reason(begun, made, "prepare")
    assert why == "speculators was 0.3.0, is 0.4.0"


def test_the_packages_that_make_tokens_count(root: Path) -> None:
    found = staleness.inputs(manifest.begin(planned(root)), planned(root), PREPARE)
    for name in ("transformers", "tokenizers"):
        assert found[name] == metadata.version(name)


def test_the_files_of_a_download_may_come_later(root: Path) -> None:
    """They are those of its commit."""
    place = root / "models--org--m" / "snapshots" / ("0" * 40)
    make_verifier(place)
    made = planned(root, model=str(place))
    before = staleness.inputs(manifest.begin(made), made, PREPARE)
    (place / "tokenizer.json").write_text("{}")
    assert staleness.inputs(manifest.begin(made), made, PREPARE) == before


def all_done(root: Path) -> Manifest:
    """As if every stage had been run."""
    made = planned(root)
    begun = manifest.begin(made)
    for stage in STAGES:
        result = MADE[stage.name].model_copy(update={"digest": stage.name})
        begun.stages[stage.name] = StageRecord(
            inputs=staleness.inputs(begun, made, stage),
            started="",
            finished="",
            digest=stage.name,
            result=result,
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
    begun = all_done(root)
    change(root, monkeypatch)
    found = reasons(begun, planned(root, **flags))
    assert found.keys() == again.keys()
    for stage, why in again.items():
        assert why in found[stage]


def test_an_option_that_is_new_in_a_release_leaves_a_run_as_it_is(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = all_done(root)
    del begun.options["storage"], begun.stages["extract"].inputs["--storage"]
    staleness.refuse_another_run(begun, planned(root), STAGES, None)
    assert reason(begun, planned(root), "extract") is None
    other = planned(root, storage="shards")
    with pytest.raises(UserError, match="--storage is rows, not shards"):
        staleness.refuse_another_run(begun, other, STAGES, None)
    assert "--storage was" in str(reason(begun, other, "extract"))


def test_a_moved_model_is_named_anew_in_the_head_alone(root: Path) -> None:
    begun = all_done(root)
    moved = (root / "model").rename(root / "moved")
    found = reasons(begun, planned(root, model=str(moved)))
    assert found == {"export": "--verifier-name has changed"}


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
    root: Path, stage: str, readers: set[str]
) -> None:
    begun, made = all_done(root), planned(root)
    begun.stages[stage].digest = "other"
    said = f"the result of {stage} was {stage}, is other"
    assert reasons(begun, made) == dict.fromkeys(readers, said)


def test_an_altered_or_missing_file_is_named(root: Path) -> None:
    begun, made, layout = finished(root)
    file = layout.prepared("d") / "data.arrow"
    file.write_text("ROWS")
    assert reason(begun, made, "prepare") == ("prepared/d/data.arrow has been altered")
    file.unlink()
    assert reason(begun, made, "prepare") == "prepared/d/data.arrow is missing"


def test_what_is_altered_is_not_gone_on_with(root: Path) -> None:
    """A stage that keeps what is there would record it as its own."""
    begun, _, layout = finished(root)
    record, file = begun.stages["prepare"], layout.prepared("d") / "data.arrow"
    staleness.drop_altered(record, layout)
    assert file.exists()
    (layout.prepared("d") / "kept").touch()
    outside = root / "outside"
    outside.touch()
    assert record.result is not None
    record.result.outputs.update({"../outside": "0", str(outside): "0", "prepared/d/gone": "0"})
    file.write_text("ROWS")
    staleness.drop_altered(record, layout)
    assert outside.exists()
    assert [there.name for there in file.parent.iterdir()] == ["kept"]


def test_rows_that_the_index_has_lost_are_missed(root: Path) -> None:
    begun, made, layout = all_done(root), planned(root), Layout(root / "run")
    layout.rows("d").mkdir(parents=True)
    index = Index(layout.rows("d"))
    file = layout.rows("d") / "data_0.pt"
    file.write_text("states")
    index.add(file.name, atomic.sha256(file), {0: 3})
    assert reason(begun, made, "extract") is None
    extract = begun.stages["extract"]
    extract.result = MADE["extract"].model_copy(update={"rows": 2})
    assert reason(begun, made, "extract") == "1 of 2 rows are in the index"
    file.write_text("STATES!")
    assert reason(begun, made, "extract") == "gen/d/data_0.pt: it has 7 bytes, not 6"


def test_what_patches_share_counts_too() -> None:
    """The sink writes the rows, and is no patch by itself; patches share what has a _ in front."""
    assert "the module spec_compat.capture.sink" in fingerprints.patches("extract")
    assert "the module spec_compat.wrappers" in fingerprints.patches("train")
    assert "the patch prepare/-turns" in fingerprints.patches("prepare")
    assert not [name for name in fingerprints.patches("map") if fingerprints.is_code(name)]


def test_a_name_of_a_file_counts(root: Path) -> None:
    (root / "model" / "a.model").write_text("the same")
    before = fingerprints.tokenizer(planned(root))
    (root / "model" / "a.model").rename(root / "model" / "b.model")
    assert fingerprints.tokenizer(planned(root)) != before


def test_the_code_of_a_patch_counts_and_its_words_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for number, text in enumerate(
        ('"""A."""\nx = 1\n', '"""B."""\n# why\nx = 1\n', '"""A."""\nx = 2\n')
    ):
        place = tmp_path / str(number)
        shutil.copytree(ROOT / "patches", place)
        (place / "prepare" / "_turns.py").write_text(text)
        monkeypatch.setattr(
            importlib.import_module("spec_compat.patches"), "__path__", [str(place)]
        )
        found.append(fingerprints.patches("prepare"))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"a": 1}',
        "\xff",
        "[" * 100_000,
        '{"schema_version": 1, "stages": {"map": {"started": "now"}}}',
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match="not the manifest of a run"):
        manifest.find(tmp_path, STAGES)


def test_a_run_of_schema_1_is_continued(root: Path) -> None:
    """It had a result's fields beside the record's own, and digests of patches that have moved."""
    begun = all_done(root)
    content = json.loads(begun.model_dump_json())
    content["schema_version"] = 1
    content["stages"]["prepare"]["result"]["parts"] = {"d": "its tokens"}
    for record in content["stages"].values():
        result = record.pop("result")
        record |= {name: result.pop(name) for name in ("digest", "outputs", "bytes", "parts")}
        record["counts"] = result
        for name in [name for name in record["inputs"] if fingerprints.is_code(name)]:
            del record["inputs"][name]
        record["inputs"]["the patch extract/-sink"] = "the digest of that time"
    content["stages"]["export"] |= {"finished": None, "counts": {}, "outputs": {}}
    content["checksum"] = manifest.digest_of(content)
    (root / "run").mkdir()
    (root / "run" / "manifest.json").write_text(json.dumps(content))
    found = manifest.find(root / "run", STAGES)
    assert found is not None
    assert found.result(TRAIN) == MADE["train"]
    assert staleness.parts(found, EXTRACT) == {"d": "its tokens"}
    assert reasons(found, planned(root)) == {"export": ""}
    found.save(Layout(root / "run"))
    assert manifest.find(root / "run", STAGES) == found


def test_an_altered_manifest_is_refused(root: Path) -> None:
    (root / "run").mkdir()
    manifest.begin(planned(root)).save(Layout(root / "run"))
    file = root / "run" / "manifest.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(UserError, match="altered since it was written; restore it"):
        manifest.find(root / "run", STAGES)


@pytest.mark.parametrize(
    "new", [{"schema_version": 3, "sources": []}, {"options": {"not_yet_thought_of": 1}}]
)
def test_a_manifest_of_a_newer_release_is_refused_by_that_release(
    new: dict[str, Any], tmp_path: Path
) -> None:
    content = {"schema_version": 1, "spec_compat": "9.9", "options": {}, **new}
    content["checksum"] = manifest.digest_of(content)
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"written by spec-compat 9\.9, which .* cannot read"):
        manifest.find(tmp_path, STAGES)


def test_a_directory_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="not empty, and not the directory of a run"):
        manifest.find(tmp_path, STAGES)


def test_a_run_that_was_killed_before_its_manifest_was_whole_begins_again(root: Path) -> None:
    begun = Layout(root / "run")
    begun.root.mkdir()
    (begun.root / ".lock").touch()
    # As a kill leaves it: nothing is removed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", lambda *paths: sys.exit("killed"))
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)
        with pytest.raises(SystemExit, match="killed"):
            manifest.begin(planned(root)).save(begun)
    assert len(list(begun.root.iterdir())) == 2
    assert manifest.find(begun.root, STAGES) is None


def test_a_file_in_the_place_of_the_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(UserError, match="this is a file"):
        manifest.find(tmp_path / "run", STAGES)
    with pytest.raises(UserError, match="cannot be written"):
        manifest.find(tmp_path / "run" / "below", STAGES)


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

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with pytest.raises(UserError) as caught, locked(tmp_path / "run", Notes()):
        pass
    assert says in str(caught.value)


def test_a_stage_is_cleared_without_touching_the_others(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    for path in (layout.root / name for stage in STAGES for name in stage.writes):
        path.parent.mkdir(exist_ok=True)
        path.mkdir() if not path.suffix else path.touch()
    layout.clear(TRAIN.writes)
    layout.clear(TRAIN.writes)
    assert not layout.checkpoints.exists()
    assert not layout.metrics.exists()
    assert layout.gen.exists()
    assert layout.head.exists()


def test_the_rows_of_a_dataset_stay_when_another_is_added_or_goes(root: Path) -> None:
    begun, made, layout = all_done(root), planned(root), Layout(root / "run")
    prepare, extract = begun.stages["prepare"], begun.stages["extract"]
    extract.parts = {"a": "1", "b": "2", "c": "3"}
    prepare.digest = "other"
    prepare.result = PREPARED.model_copy(update={"parts": {"a": "1", "b": "other", "d": "4"}})
    now = staleness.inputs(begun, made, EXTRACT)
    kept = staleness.kept(begun, EXTRACT, now)
    assert kept == {"a"}
    for name in "abc":
        layout.rows(name).mkdir(parents=True)
    layout.clear(EXTRACT.writes, keep=kept)
    assert [path.name for path in layout.gen.iterdir()] == ["a"]
    assert not staleness.kept(begun, TRAIN, now)
    assert not staleness.kept(begun, EXTRACT, {**now, "model": "other"})
    layout.clear(EXTRACT.writes)
    assert not layout.gen.exists()


@pytest.mark.parametrize("stage", STAGES[1:], ids=str)
def test_what_was_put_on_another_disk_stays_there(stage: Stage[Any], tmp_path: Path) -> None:
    layout = Layout(tmp_path / "run")
    place, elsewhere = layout.root / stage.writes[0], tmp_path / "elsewhere"
    (elsewhere / "d").mkdir(parents=True)
    (elsewhere / "file").touch()
    place.parent.mkdir()
    place.symlink_to(elsewhere)
    layout.clear(stage.writes)
    assert place.is_symlink()
    assert not list(elsewhere.iterdir())
    with atomic.replacing_directory(place) as directory:
        (directory / "new").touch()
    assert place.is_symlink()
    assert [file.name for file in elsewhere.iterdir()] == ["new"]


def test_each_option_belongs_to_the_first_stage_that_reads_it_or_changes_no_result() -> None:
    """An option that no stage knows would be changed without anything being done again."""
    free = {
        "output", "num_preprocessing_workers", "hf_cache_dir", "trust_remote_code", "sink_buffers",
        "on_bad_row", "max_bad_rows", "tensor_parallel_size", "gpu_memory_utilization", "max_disk",
        "on_full_disk", "server_url", "stop_server_cmd", "restart_server_cmd", "num_workers",
        "train_gpus",
    }  # fmt: skip
    of_stages = [name for stage in STAGES for name in stage.options]
    assert sorted([*of_stages, *free]) == sorted(config.RunConfig.model_fields)


def test_the_manifest_is_json_for_others(root: Path) -> None:
    content = json.loads(manifest.begin(planned(root)).model_dump_json())
    assert content["options"]["layer_ids"] == [2, 4, 5, 7]
    assert Manifest.model_validate(content)
