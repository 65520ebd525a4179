"""Run as `python -I stranger.py <load|train> <job.json>`: a machine that has transformers, but not this package.

The package is installed where the tests run, so its name is refused; modules of the same name that transformers copies
into `transformers_modules` may load. Sockets are refused too: nothing may be fetched.
"""

import json
import socket
import sys
import time
from pathlib import Path

PACKAGE = "modeling_dsx_encoder"


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == PACKAGE:
            raise ModuleNotFoundError(f"No module named {name!r}")


def refuse_network(*_):
    raise AssertionError("a socket was opened")


sys.meta_path.insert(0, Refuse())
socket.socket.connect = refuse_network

import torch  # noqa: E402, the refusals come first
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

torch.set_num_threads(1)


def load(job):
    """Load each folder by its Auto class, compute, and ask its pipeline."""
    report = {}
    for name, (folder, auto_class, task) in job["models"].items():
        model, loading = getattr(transformers, auto_class).from_pretrained(
            folder, trust_remote_code=True, output_loading_info=True
        )
        with torch.no_grad():
            outputs = model(**load_file(f"{job['inputs']}/{auto_class}"))
        save_file({"output": outputs[0].contiguous()}, f"{job['outputs']}/{name}")
        answer = None
        if task:
            mask = "[MASK]" if task == "fill-mask" else "好"
            pipeline = transformers.pipeline(task, model=folder, trust_remote_code=True)
            answer = pipeline([f"这本书很{mask}", mask])
            pipeline_module = type(pipeline.model).__module__
            assert pipeline_module.startswith("transformers_modules"), pipeline_module
        report[name] = {
            "module": type(model).__module__,
            "config_module": type(model.config).__module__,
            "class": type(model).__name__,
            "loading": {key: sorted(map(str, value)) for key, value in loading.items() if value},
            "answer": answer,
        }
    start = time.monotonic()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)  # without the flag: no question may be asked
    report["tokenizer"] = {"class": type(tokenizer).__name__, "seconds": time.monotonic() - start}
    return report


def train(job):
    """Train a classifier that came as remote code, from the start or from a checkpoint."""
    checkpoint = job["resume_from"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        checkpoint or job["folder"], trust_remote_code=True
    )
    rows = [{"input_ids": [2, 5 + row, 9, 3], "attention_mask": [1] * 4, "labels": row % 3} for row in range(16)]
    arguments = transformers.TrainingArguments(
        output_dir=job["outputs"],
        per_device_train_batch_size=4,
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=checkpoint)
    save_file({name: value.clone() for name, value in model.state_dict().items()}, f"{job['outputs']}/weights")
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    return {"module": type(model).__module__, "losses": losses}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))
    report = {"load": load, "train": train}[sys.argv[1]](job)
    assert PACKAGE not in sys.modules
    Path(job["report"]).write_text(json.dumps(report, default=float), encoding="utf-8")
