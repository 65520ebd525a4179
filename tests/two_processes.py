"""Under `accelerate launch`: one step without learning for every loss, of padded and of flattened batches.

The main process prints what was logged and predicted.
"""

import json
import sys

from accelerate import PartialState
from learner import LOSSES, learner
from test_two_processes import NUM_ROWS, shown, tokenizer


def main() -> None:
    """Print {loss: {"losses": [[train loss, gradient norm, evaluation loss], ...], "predictions": flattened}}."""
    found = {}
    for name in LOSSES:
        losses = []
        for flatten, accumulation in ((False, 1), (False, 4), (True, 4)):
            rows = NUM_ROWS // 2 // accumulation
            options = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": rows}
            options |= {"per_device_eval_batch_size": 5, "learning_rate": 0.0, "num_train_epochs": 1}
            trainer = learner(name, sys.argv[1], tokenizer(), num_rows=NUM_ROWS, flatten=flatten, **options)
            trainer.train()
            (step,) = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
            evaluation = trainer.evaluate()["eval_loss"]
            losses.append([step["loss"], step["grad_norm"], evaluation])
        predictions = trainer.predict(trainer.eval_dataset).predictions
        found[name] = {"losses": losses, "predictions": shown(predictions).tolist()}
    if PartialState().is_main_process:
        print("FOUND" + json.dumps(found))
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
