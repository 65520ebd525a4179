"""The folders of a run: what is resumed from, what is refused, how the finished model gets its place."""

import json

import pytest
from learner import arguments, assert_same, learner, weights

from modeling_dsx_encoder import DsxEncoderForSequenceClassification
from modeling_dsx_encoder.runs import last_checkpoint, prepare_run, put_in_place, save_finished, write_json


def make_checkpoint(folder, step, state=True):
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    if state:
        (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return str(path)


def test_half_written_checkpoints_are_not_resumed_from(tmp_path):
    assert last_checkpoint(tmp_path / "nothing") is None
    whole_one = make_checkpoint(tmp_path, 9)
    make_checkpoint(tmp_path, 10, state=False)
    broken = make_checkpoint(tmp_path, 11)
    (tmp_path / "checkpoint-11" / "trainer_state.json").write_text('{"global_st')
    assert last_checkpoint(tmp_path) == whole_one != broken


def test_an_earlier_run_is_gone_on_with_dropped_or_refused(tmp_path):
    last = make_checkpoint(tmp_path / "checkpoints", 3)
    with pytest.raises(ValueError, match=r"output_dir=.* holds checkpoints .*--overwrite_output_dir true"):
        prepare_run(arguments(tmp_path))
    args = arguments(tmp_path, resume_from_checkpoint="true")
    assert prepare_run(args) == tmp_path
    assert (args.resume_from_checkpoint, args.output_dir) == (last, str(tmp_path / "checkpoints"))
    args = arguments(tmp_path, overwrite_output_dir=True)
    prepare_run(args)
    assert args.resume_from_checkpoint is None
    assert not (tmp_path / "checkpoints").exists()
    args = arguments(tmp_path, resume_from_checkpoint="True")
    prepare_run(args)
    assert args.resume_from_checkpoint is None  # nothing to resume from yet: the first run of a job that may restart


def test_finished_model_takes_its_place_at_once(tmp_path, tiny_tokenizer):
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"old")
    args = arguments(tmp_path, num_train_epochs=1)
    output = prepare_run(args)
    trainer = learner("single_label", args.output_dir, tiny_tokenizer)
    save_finished(trainer, output, {"test_accuracy": 0.5}, (args,))
    names = {path.name for path in tmp_path.iterdir()}
    assert {"config.json", "model.safetensors", "metrics.json", "recipe.yaml"} <= names
    assert not names & {"model-00001-of-00002.safetensors", ".unfinished", "training_args.bin"}
    assert json.loads((tmp_path / "metrics.json").read_text())["test_accuracy"] == 0.5
    assert f"output_dir: {tmp_path}" in (tmp_path / "recipe.yaml").read_text()
    loaded = DsxEncoderForSequenceClassification.from_pretrained(tmp_path)
    assert_same(weights(loaded), weights(trainer.model))


def test_a_run_that_fails_while_saving_leaves_the_old_model(tmp_path, tiny_tokenizer, monkeypatch):
    args = arguments(tmp_path, num_train_epochs=1)
    output = prepare_run(args)
    trainer = learner("single_label", args.output_dir, tiny_tokenizer)
    save_finished(trainer, output, {}, (args,))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr("modeling_dsx_encoder.runs.write_json", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_finished(trainer, output, {}, (args,))
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}


def test_json_is_written_whole(tmp_path):
    write_json(tmp_path / "new" / "a.json", {"答案": 1})
    assert (tmp_path / "new" / "a.json").read_text(encoding="utf-8") == '{\n  "答案": 1\n}\n'
    with pytest.raises(TypeError, match="JSON"):
        write_json(tmp_path / "new" / "a.json", {"a": object()})
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_an_earlier_folder_stays_where_the_new_one_cannot_take_its_place(tmp_path):
    target, finished = tmp_path / "target", tmp_path / "finished"
    for folder in (target, finished):
        folder.mkdir()
        (folder / "name").write_text(folder.name)

    class Stopped(type(finished)):
        def replace(self, target):
            if self.name == "finished":
                raise KeyboardInterrupt
            return super().replace(target)

    with pytest.raises(KeyboardInterrupt):
        put_in_place(Stopped(finished), target)
    assert (target / "name").read_text() == "target"
    put_in_place(finished, target)
    assert (target / "name").read_text() == "finished"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
