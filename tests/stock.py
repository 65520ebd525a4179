"""Small stock encoders with random weights, and the comparison of one with the DSX encoder it becomes.

- `FAMILIES_BERT`: configurations of every BERT-like family, several each
- `stock_model()`: one of them, every weight far from its start
- `differences()`: of hidden states, last hidden state, pooler output and logits, on real tokens alone
"""

import copy
from itertools import product

import torch
from tiny import scramble

from modeling_dsx_encoder.families import find_family

SMALL = {
    "vocab_size": 103,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 45,
    "num_labels": 3,
}
ODD = {
    "vocab_size": 131,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 50,
    "max_position_embeddings": 61,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-3,
    "tie_word_embeddings": False,
    "num_labels": 5,
}
BERT_LIKE = {
    "small": SMALL,
    "odd": ODD,
    "relu": SMALL | {"hidden_act": "relu", "type_vocab_size": 4, "layer_norm_eps": 1e-5, "num_attention_heads": 1},
}
NO_TYPES = {
    name: {key: value for key, value in fields.items() if key != "type_vocab_size"}
    for name, fields in BERT_LIKE.items()
}
DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
CONFIGURATIONS = {
    "bert": BERT_LIKE | {"no_pad": SMALL | {"pad_token_id": None, "eos_token_id": [2, 3]}},
    "roberta": BERT_LIKE | {"pad_3": SMALL | {"pad_token_id": 3}},
    "xlm-roberta": {"odd": ODD, "small": SMALL},
    "camembert": {"small": SMALL},
    "roberta-prelayernorm": BERT_LIKE,
    "electra": {name: fields | {"embedding_size": 20} for name, fields in BERT_LIKE.items()}
    | {"as_wide": SMALL | {"embedding_size": 32, "summary_activation": "tanh"}},
    "mpnet": NO_TYPES | {"long": SMALL | {"max_position_embeddings": 300}},
    "distilbert": {
        name: {DISTILBERT_NAMES.get(key, key): value for key, value in fields.items() if key != "layer_norm_eps"}
        for name, fields in (NO_TYPES | {"sines": SMALL | {"sinusoidal_pos_embds": True}}).items()
    },
}


def stock_config(family_name, configuration, **changes):
    """A configuration of CONFIGURATIONS as the family's class."""
    return find_family(family_name).config_class(**CONFIGURATIONS[family_name][configuration] | changes)


def stock_model(head, config, attention="eager", seed=0):
    """A stock model of the head's class in eval mode, weights of a size that matters."""
    family = find_family(config.model_type)
    torch.manual_seed(seed)
    config = copy.deepcopy(config)
    config.num_labels = 2 if "Question" in head.stock_class_name else config.num_labels
    model = family.stock_class(head)._from_config(config, attn_implementation=attention)
    scramble(model, seed)
    with torch.no_grad():  # logits of tied decoders of about 1, so that 1e-5 is far above rounding
        model.get_input_embeddings().weight.mul_(0.4)
    return model.eval()


def padded_batch(config, lengths, side="right", seed=3):
    """Token ids (B, L), mask and token types; the padding id stands on padding alone, as RoBERTa needs it."""
    generator = torch.Generator().manual_seed(seed)
    pad = 0 if config.pad_token_id is None else config.pad_token_id
    width = max(lengths)
    input_ids = torch.full((len(lengths), width), pad)
    mask, types = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    num_types = getattr(config, "type_vocab_size", 0)
    for row, length in enumerate(lengths):
        where = slice(0, length) if side == "right" else slice(width - length, width)
        ids = torch.randint(0, config.vocab_size - 1, (length,), generator=generator)
        input_ids[row, where] = ids + (ids >= pad)  # any id but the padding's
        mask[row, where] = 1
        types[row, where] = torch.randint(0, num_types or 1, (length,), generator=generator)
    return {"input_ids": input_ids, "attention_mask": mask} | ({"token_type_ids": types} if num_types else {})


def for_choices(inputs, name):
    """The same rows as one example with as many choices, where the head is multiple choice."""
    return {key: value[None] for key, value in inputs.items()} if name == "MultipleChoice" else inputs


def outputs_of(model, inputs, name, **more):
    """Everything the model gives, as `{what: (tensor, is it one row a token?)}`, without gradients."""
    with torch.no_grad():
        outputs = model(**for_choices(inputs, name), **more)
    found = {f"hidden state {i}": (tensor, True) for i, tensor in enumerate(outputs.get("hidden_states") or ())}
    for what in ("last_hidden_state", "start_logits", "end_logits", "logits", "pooler_output"):
        if outputs.get(what) is not None:
            of_tokens = what not in ("logits", "pooler_output") or name in ("MaskedLM", "TokenClassification")
            found[what] = (outputs[what], of_tokens)
    return found


def real_rows(tensor, of_tokens, mask):
    """The real tokens of `(B, L, ...)` in order, or the tensor itself where its rows are sequences."""
    return tensor[mask.bool()] if of_tokens else tensor


def differences(stock, ours, name, lengths):
    """Largest difference of each output over attentions, sides of our padding, and with or without work on padding.

    The stock model reads the batch padded on the right: tables of absolute positions shift under padding on the left.
    """
    inputs = padded_batch(stock.config, lengths)
    theirs = outputs_of(stock, inputs, name, output_hidden_states=True)
    found = dict.fromkeys(theirs, 0.0)
    for attention, side in product(("eager", "sdpa"), ("right", "left")):
        ours.set_attn_implementation(attention)
        ours_in = padded_batch(stock.config, lengths, side)
        mine = outputs_of(ours, ours_in, name, output_hidden_states=True)  # every token is computed
        flat = outputs_of(ours, ours_in, name)  # real tokens alone
        assert set(mine) == set(theirs), set(mine) ^ set(theirs)
        for what, (tensor, of_tokens) in theirs.items():
            wanted = real_rows(tensor, of_tokens, inputs["attention_mask"])
            assert wanted.abs().max() > 0.05, f"{what} is too small to tell anything"
            for tensor, _ in [outputs[what] for outputs in (mine, flat) if what in outputs]:
                given = real_rows(tensor, of_tokens, ours_in["attention_mask"])
                found[what] = max(found[what], (wanted - given).abs().max().item())
    return found
