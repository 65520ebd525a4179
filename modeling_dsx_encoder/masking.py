"""Masked language modelling: which tokens are hidden, and what the model sees in their place.

- The mask of a row depends on the seed, the epoch and the row's own tokens, on nothing else: not on the batch it
  is in, its place there, the number of processes or workers, nor on whether training was interrupted.
- `MaskedLanguageModelingCollator` masks while it makes batches; `set_epoch` gives it new masks. DsxTrainer calls it;
  another Trainer needs `EpochCallback` (epoch_order.py), or every epoch has the masks of the first.
- `fixed_masks()` writes masks into the rows once, for evaluation.
"""

from hashlib import blake2b

import numpy as np
import torch
from datasets import Dataset
from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerBase

from .encoding import IGNORED
from .flattening import FlatteningCollator

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1  # of the chosen tokens; the rest is shown as it is (BERT, arXiv:1810.04805)


class MaskedLanguageModelingCollator:
    """Mask rows and pad them to a batch with `labels`; rows that have `labels` already are not masked again.

    Not `DataCollatorForLanguageModeling`: the state of its random generator makes a resumed run see other masks than
    an unbroken one, and an evaluation's masks depend on its batches. It also masks special tokens written in the text.

    Args:
        mask_probability: share of the tokens to predict; 0.3 trains better than BERT's 0.15 at equal cost
            (arXiv:2202.08005).
        pad_to_multiple_of: round the width of each batch up to a multiple.
        flatten: lay the rows end to end instead of padding them (`FlatteningCollator`).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        mask_probability: float = 0.3,
        seed: int = 0,
        pad_to_multiple_of: int | None = None,
        flatten: bool = False,
    ):
        if tokenizer.mask_token_id is None:
            raise ValueError(
                "the tokenizer has no mask_token, but masked language modelling writes it over tokens; "
                "add one with tokenizer.add_special_tokens({'mask_token': '[MASK]'})"
            )
        if not 0 < mask_probability <= 1:
            raise ValueError(
                f"mask_probability is {mask_probability}, but it is a share above 0 and up to 1; 0.3 is usual"
            )
        self.mask_probability = mask_probability
        self.seed = seed
        self.mask_token_id = tokenizer.mask_token_id
        self._special = np.array(sorted(tokenizer.all_special_ids))
        # What a random replacement is drawn from: every ordinary token.
        self._ordinary = np.array(sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids)))
        if flatten and pad_to_multiple_of:
            raise ValueError(
                f"pad_to_multiple_of is {pad_to_multiple_of}, but flatten=True pads nothing; leave one out"
            )
        self._join = DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=pad_to_multiple_of)
        if flatten:
            self._join = FlatteningCollator(labels_per="token")
        # Shared memory, so that workers which outlive an epoch hear of the next one.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the masks of this epoch; to be called at its start, when training is resumed too."""
        self._epoch.fill_(epoch)

    def mask_row(self, row: dict) -> dict:
        """Give a row (`input_ids` and others) masked `input_ids`, and `labels` with the tokens to predict."""
        tokens = np.asarray(row["input_ids"], dtype=np.int64)
        digest = blake2b(tokens.tobytes(), digest_size=16, key=f"{self.seed}/{int(self._epoch)}".encode()).digest()
        random = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
        chance, kind = random.random((2, len(tokens)))
        chosen = (chance < self.mask_probability) & ~np.isin(tokens, self._special)
        replacement = self._ordinary[random.integers(len(self._ordinary), size=len(tokens))]
        shown = np.where(kind < MASK_SHARE + RANDOM_SHARE, replacement, tokens)
        shown = np.where(kind < MASK_SHARE, self.mask_token_id, shown)
        masked = {name: value for name, value in row.items() if name != "special_tokens_mask"}
        masked["input_ids"] = np.where(chosen, shown, tokens).tolist()
        masked["labels"] = np.where(chosen, tokens, IGNORED).tolist()
        return masked

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """Make one batch."""
        return dict(self._join([row if "labels" in row else self.mask_row(row) for row in rows]))


def fixed_masks(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, *, mask_probability: float = 0.3, seed: int = 0
) -> Dataset:
    """Mask the rows of an evaluation set once, so that every evaluation asks for the same tokens.

    Args:
        dataset: rows as `tokenize_texts` makes them.
    """
    collator = MaskedLanguageModelingCollator(tokenizer, mask_probability, seed)
    collator.set_epoch(-1)  # no epoch of training has it, so a training row is not asked for what it was trained on
    hidden = [name for name in dataset.column_names if name == "special_tokens_mask"]
    return dataset.map(collator.mask_row, remove_columns=hidden, desc="Masking", load_from_cache_file=False)
