"""The folders of a run: where checkpoints lie, which one is resumed from, how the finished model gets its place.

    <output_dir>/                 the finished model: config, weights, code, tokenizer, metrics.json, recipe.yaml
    <output_dir>/checkpoints/     checkpoint-<step> of the trainer, to resume from

- a run that fails or is killed never touches what an earlier one finished: the finished model is written under a
  temporary name and moved
- a checkpoint that was not written to its end is never resumed from
"""

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from .recipe import save_recipe

logger = logging.getLogger(__name__)

CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def last_checkpoint(folder: str | os.PathLike) -> str | None:
    """The newest checkpoint that was written to its end; half-written ones (a killed run) are named and left out."""
    found = [path for path in Path(folder).glob("checkpoint-*") if CHECKPOINT_NAME.fullmatch(path.name)]
    for path in sorted(found, key=lambda path: int(path.name.rpartition("-")[2]), reverse=True):
        with contextlib.suppress(OSError, ValueError):
            if json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["global_step"] > 0:
                return str(path)
        logger.warning("%s was not written to its end: it is not resumed from", path)
    return None


def prepare_run(args: TrainingArguments) -> Path:
    """Sends the checkpoints of a run to `<output_dir>/checkpoints` and settles where it starts; returns output_dir.

    `resume_from_checkpoint` "true" becomes the last finished checkpoint, or None where there is none yet.
    """
    output = Path(args.output_dir)
    checkpoints = output / "checkpoints"
    resume = args.resume_from_checkpoint
    if isinstance(resume, str) and resume.lower() in ("true", "false"):
        resume = last_checkpoint(checkpoints) if resume.lower() == "true" else None
        if resume is None and args.resume_from_checkpoint.lower() == "true":
            logger.warning("%s holds no finished checkpoint: training starts from the beginning", checkpoints)
    args.output_dir, args.resume_from_checkpoint = str(checkpoints), resume
    with args.main_process_first(local=False, desc="output folder"):
        if args.process_index == 0 and resume is None and checkpoints.exists():
            if not getattr(args, "overwrite_output_dir", False) and last_checkpoint(checkpoints):
                raise ValueError(
                    f"output_dir={str(output)!r} holds checkpoints of an earlier run: go on with it by "
                    "--resume_from_checkpoint true, drop its checkpoints by --overwrite_output_dir true, or give "
                    "another --output_dir"
                )
            shutil.rmtree(checkpoints)
    return output


def put_in_place(finished: Path, target: Path) -> None:
    """Give a finished folder, on the same disk, the name `target`; what stood there goes, or stays if this fails."""
    finished.chmod(0o755)  # mkdtemp makes folders that only their owner may read
    outdated = finished.with_name(f"{finished.name}.old")
    try:
        if target.exists():
            target.replace(outdated)
        finished.replace(target)
    except BaseException:
        if outdated.exists() and not target.exists():
            outdated.replace(target)
        raise
    shutil.rmtree(outdated, ignore_errors=True)


def write_json(path: str | os.PathLike, values: Mapping) -> None:
    """Writes a JSON file under a temporary name and moves it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(dict(values), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def save_finished(trainer: Trainer, output: Path, metrics: Mapping[str, float], arguments: tuple) -> None:
    """Writes model, tokenizer, metrics.json and recipe.yaml into `output`, each file whole or not at all."""
    temporary = output / ".unfinished"
    if trainer.args.should_save:
        shutil.rmtree(temporary, ignore_errors=True)
    trainer.save_model(str(temporary))
    if trainer.args.should_save:
        # A pickle with paths of this machine; recipe.yaml says the same in the open.
        (temporary / "training_args.bin").unlink(missing_ok=True)
        write_json(temporary / "metrics.json", metrics)
        save_recipe(arguments, temporary, output_dir=str(output))
        fresh = {path.name for path in temporary.iterdir()}
        for name in sorted(fresh):
            os.replace(temporary / name, output / name)
        temporary.rmdir()
        # Weights of an earlier model in another number of files would be loaded in place of the new ones.
        for pattern in WEIGHT_FILES:
            for path in output.glob(pattern):
                if path.name not in fresh:
                    path.unlink()
