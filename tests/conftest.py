"""What all tests share: offline, one thread, one seed, a tiny configuration, a tokenizer in memory."""

import os
import string

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, set_seed

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CHARACTERS = (
    "的一是不好很坏快慢买家书机手这本送货服务电影真糟糕喜欢推荐差失望，。！？,.!?0123456789" + string.ascii_lowercase
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _one_seed():
    set_seed(0)


@pytest.fixture
def tiny_config():
    """A function: `tiny_config(**overrides)` gives a 2-layer, 32-wide, 4-head configuration with 99 tokens."""
    from tiny import tiny_config as make_tiny_config  # here, so that a broken model does not fail every test file

    return make_tiny_config


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A character tokenizer of at most 99 pieces that needs no file: [CLS] a [SEP] (b [SEP])."""
    pieces = [*SPECIAL_TOKENS, *dict.fromkeys(CHARACTERS)]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    assert len(vocabulary) <= 99
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
    )
