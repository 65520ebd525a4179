"""Case of the loss multiplied by the number of processes: two processes log the mean that one computes by hand.

Of flattened batches too, whose predictions are those of one process, row by row.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner import LOSSES, learner
from tokenizers import Tokenizer, models
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
NUM_ROWS = 32


def tokenizer():
    """Pads, which is all that rows of ready tokens need."""
    backend = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")


def shown(predictions):
    """Enough of the predictions; Trainer pads with -100 what the head filled with the lowest number."""
    starts = predictions[0] if isinstance(predictions, tuple) else predictions
    return starts[..., :20].clip(min=-100)


def by_hand(name, folder):
    """Loss and gradient norm of all rows in one batch, through the model alone."""
    trainer = learner(name, folder, tokenizer(), num_rows=NUM_ROWS)
    model = trainer.model.train()
    rows = [trainer.train_dataset[row] for row in range(NUM_ROWS)]
    loss = model(**trainer.data_collator(rows)).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return [loss.item(), norm.item(), loss.item()]


def test_every_loss_is_that_of_one_process(tmp_path):
    file = ROOT / "configuration/accelerate/cpu_two_processes.yaml"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, "--main_process_port", 0]
    done = subprocess.run(
        list(map(str, [*launch, ROOT / "tests/two_processes.py", tmp_path])),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("FOUND")[2].splitlines()[0])
    assert set(found) == set(LOSSES)
    for name in LOSSES:
        expected = by_hand(name, tmp_path)
        assert len(found[name]["losses"]) == 3
        for values in found[name]["losses"]:
            assert values == pytest.approx(expected, abs=1e-4, rel=1e-4), name
        alone = learner(name, tmp_path, tokenizer(), num_rows=NUM_ROWS, flatten=True)
        predictions = torch.from_numpy(shown(alone.predict(alone.eval_dataset).predictions))
        assert_close(torch.tensor(found[name]["predictions"]), predictions, atol=1e-5, rtol=1e-5)
