"""The evaluation, on a tiny random model."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from rich.console import Console
from safetensors.torch import load_file
from spillway_kv.lab.evaluation import ablation, intervals, language, perplexity, results, retrieval
from spillway_kv.lab.evaluation.attends import EXACT, Case, Outcome, measure, rows_in_daemon
from spillway_kv.lab.evaluation.calibration import choose_channels
from spillway_kv.lab.evaluation.command import app
from spillway_kv.lab.evaluation.decoding import Row, step
from spillway_kv.lab.evaluation.fidelity import at_equal_rows
from spillway_kv.lab.evaluation.indexing import (
    DEFAULT_INDEX,
    Index,
    NotServedError,
    check_policy,
    write_rotations,
)
from spillway_kv.lab.evaluation.methods import chosen, registry
from spillway_kv.lab.evaluation.recording import grid_of
from spillway_kv.lab.evaluation.retrieval import score, true_tops
from spillway_kv.lab.evaluation.setting import Setting
from spillway_kv.lab.evaluation.tasks import TASKS, Question, needle_at, sized
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.lab.training.hash_mlp import (
    HashAttentionMlps,
    HashMlp,
    Hyperplanes,
    ThreeLayerMlp,
    save_hash,
)
from spillway_kv.policy import Policy
from spillway_kv.transformers.support import Shapes
from tiny_model import WORDS, draw_words, save_tiny_llama
from typer.testing import CliRunner

TOKEN_COUNT = 2400


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model with its tokenizer, and a text of words in its vocabulary."""
    folder = tmp_path_factory.mktemp("tiny")
    # The weights are large enough that attention is not flat.
    save_tiny_llama(
        folder, num_hidden_layers=2, max_position_embeddings=4096, initializer_range=0.2
    )
    text = folder / "text.txt"
    text.write_text(" ".join(WORDS[i] + "." * (i % 10 == 0) for i in draw_words(4000)))
    return folder, text


@pytest.fixture
def bench(tiny: tuple[Path, Path], target: str, tmp_path: Path) -> Iterator[Workbench]:
    folder, text = tiny
    setting = Setting(
        str(folder), (text,), tmp_path, token_count=TOKEN_COUNT, query_count=4, daemon=target
    )
    with Workbench(setting, Console(quiet=True)) as bench:
        yield bench


def evaluate(tiny: tuple[Path, Path], target: str, output: Path, section: str, *more: str) -> Any:
    folder, text = tiny
    words = [section, str(folder), str(text), "--output", str(output), "--daemon", target]
    words += ["--length", str(TOKEN_COUNT), "--queries", "4", *more]
    answer = CliRunner().invoke(app, words, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return json.loads((output / f"{section}.json").read_text())


def test_fidelity_from_end_to_end(tiny: tuple[Path, Path], target: str, tmp_path: Path) -> None:
    methods = "oracle-top-k,oracle-top-p,codes,vattention-codes,lsh,ours"
    told = evaluate(tiny, target, tmp_path, "fidelity", "--methods", methods)
    curves = {method["name"]: method["points"] for method in told["found"]["methods"]}
    assert ",".join(curves) == methods
    for points in curves.values():
        for point in points:
            low, high = point["error"]["interval"]
            assert low <= point["error"]["mean"] <= high
    for name in ("oracle-top-k", "oracle-top-p", "ours"):
        errors = [point["error"]["mean"] for point in curves[name]]
        rows = [point["rows"]["mean"] for point in curves[name]]
        assert errors == sorted(errors, reverse=True), name
        assert rows == sorted(rows), name
    equal = {entry["name"]: entry for entry in told["found"]["at_equal_rows"]}
    assert equal["ours"]["ratio"] == 1
    assert told["setting"]["token_count"] == TOKEN_COUNT
    assert told["versions"]["daemon"]

    # Finished parts are not measured again, and the plots are made from the JSON files alone.
    parts = sorted((tmp_path / "work/parts").iterdir())
    times = [part.stat().st_mtime_ns for part in parts]
    again = evaluate(tiny, target, tmp_path, "fidelity", "--methods", methods)
    assert again["found"] == told["found"]
    assert [part.stat().st_mtime_ns for part in parts] == times
    for file in ("README.md", "fidelity.png", "fidelity_layers.png"):
        (tmp_path / file).unlink()
    answer = CliRunner().invoke(app, ["report", str(tmp_path)], catch_exceptions=False)
    assert answer.exit_code == 0
    assert (tmp_path / "fidelity.png").stat().st_size > 10_000
    assert "oracle top-k" in (tmp_path / "README.md").read_text()


def test_guarantee_from_end_to_end(tiny: tuple[Path, Path], target: str, tmp_path: Path) -> None:
    options = ("--promises", "paper-oracle,stratified-codes", "--epsilons", ".1,.2", "--deltas")
    told = evaluate(tiny, target, tmp_path, "guarantee", *options, ".1", "--seeds", "2")
    cells = {
        (promise["name"], cell["epsilon"]): cell
        for promise in told["found"]["promises"]
        for cell in promise["cells"]
    }
    assert len(cells) == 4
    for cell in cells.values():
        low, high = cell["interval"]
        assert low <= cell["share"] <= high
        assert cell["draw_count"] == 2 * 4 * 2 * 4  # layers, queries, seeds, heads
        assert cell["verdict"] in ("kept", "open", "broken")
    assert (tmp_path / "guarantee.png").exists()


def test_reuse_from_end_to_end(tiny: tuple[Path, Path], target: str, tmp_path: Path) -> None:
    told = evaluate(tiny, target, tmp_path, "reuse")
    found = told["found"]
    assert [layer["layer"] for layer in found["layers"]] == [0, 1]
    assert found["layers"][0]["guessed_shares"] is None
    for layer in found["layers"]:
        hits = layer["hit_shares"]
        assert hits == sorted(hits)
        assert 0 <= layer["moved"] <= layer["heavy"] + layer["sampled"]
        assert layer["sample_kept_share_held"] >= layer["sample_kept_share"]
    assert (tmp_path / "reuse.png").stat().st_size > 10_000
    assert "heavy rows among them" in (tmp_path / "README.md").read_text()


def test_retrieval_and_ablation(tiny: tuple[Path, Path], target: str, tmp_path: Path) -> None:
    names = "oracle,lsh-32,lsh-128,codes-1,codes-4"
    told = evaluate(tiny, target, tmp_path, "retrieval", "--rankings", names)
    mass = {r["name"]: r["mass"]["mean"] for r in told["found"]["rankings"]}
    assert mass["lsh-32"] < mass["lsh-128"] < mass["codes-4"] <= mass["oracle"] * 1.01
    bytes_per_key = {r["name"]: r["bytes_per_key"] for r in told["found"]["rankings"]}
    assert bytes_per_key["lsh-128"] == 16
    # Planes of 16 bits are padded to 32. A key also has a factor, a norm and, rounded up, its part
    # of the page's centre.
    assert bytes_per_key["codes-4"] == 4 * 4 + 2 + 1 + 1

    told = evaluate(tiny, target, tmp_path, "ablation", "--parts", "inflation,bands,group")
    found = told["found"]
    labels = ["1", "1.25", "1.5", "2"]
    assert [variant["label"] for variant in found["variants"]] == labels
    bands = {band["label"]: band for band in found["bands"]}
    assert bands["no tail"]["cosines_1"]["mean"] > bands["no resident sample"]["cosines_1"]["mean"]
    assert {rule["rule"] for rule in found["group"]} == {"sum", "union"}


def test_perplexity_against_dense(tiny: tuple[Path, Path], target: str, tmp_path: Path) -> None:
    options = ("--methods", "oracle-top-k,ours", "--tokens", "64", "--budgets", "2")
    told = evaluate(tiny, target, tmp_path, "perplexity", *options)
    few, many = told["found"]["methods"][0]["points"]
    assert few["divergence"]["mean"] > many["divergence"]["mean"] > 0
    assert told["found"]["dense"]["token_count"] == 64
    low, high = few["perplexity_ratio"]["interval"]
    assert low <= few["perplexity_ratio"]["mean"] <= high


def test_rows_of_8_bits_are_compared_with_those_in_bfloat16(bench: Workbench) -> None:
    stored = DEFAULT_INDEX.storing("int8")
    assert stored is not None
    cases = [Case(DEFAULT_INDEX, EXACT), Case(stored, EXACT), Case(stored, Policy())]
    exact, dense, sparse = measure(bench, cases, "rows")
    assert bench.daemon_model(stored, bench.recordings[0].scaling).row_type == "int8"
    assert (exact.errors == 0).all()
    # What storing changes, of which certificates say nothing.
    assert 0 < dense.errors.mean() < 0.02
    assert (dense.certified == 0).all()
    assert dense.errors.mean() < sparse.errors.mean() < 0.2
    # Earlier results are found, and those of other rows are others.
    assert "row_type" not in DEFAULT_INDEX.described()
    assert stored.described()["row_type"] == "int8"
    assert Index(key_indices=spillway_kv.KeyIndices(int4_keys=True)).storing("int8") is None


def test_sections_of_rows_of_8_bits(tiny: tuple[Path, Path], target: str, tmp_path: Path) -> None:
    rows = ("--row-type", "int8")
    cell = ("--promises", "stratified-codes", "--epsilons", ".1", "--deltas", ".1")
    told = evaluate(tiny, target, tmp_path, "guarantee", *cell, *rows)
    assert told["parameters"]["row_type"] == "int8"
    quality = ("--methods", "quality", "--tokens", "32", "--budgets", "4")
    told = evaluate(tiny, target, tmp_path, "perplexity", *quality, *rows)
    points = {point["value"]: point for point in told["found"]["methods"][0]["points"]}
    assert list(points) == ["fast", "default", "high", "exact"]
    assert points["exact"]["rows"]["share"] == 1
    assert 0 < points["exact"]["divergence"]["mean"] < points["fast"]["divergence"]["mean"]
    told = evaluate(tiny, target, tmp_path, "fidelity", "--methods", "ours,quality", *rows)
    exact = told["found"]["methods"][1]["points"][-1]
    assert (exact["value"], exact["error"]["mean"] < 0.02) == ("exact", True)
    page = (tmp_path / "README.md").read_text()
    assert page.count("The methods' rows are stored in 8 bits (`--row-type int8`).") == 3

    def refused(*more: str) -> str:
        words = ["guarantee", *map(str, tiny), "--output", str(tmp_path), "--daemon", target]
        answer = CliRunner().invoke(app, [*words, *more], env={"COLUMNS": "200"})
        assert answer.exit_code != 0
        return " ".join(answer.output.split())

    assert "'fp8' is not model or int8" in refused("--row-type", "fp8")
    assert "no promise stratified-int4; there are" in refused(
        "--promises", "stratified-int4", *rows
    )


def test_steps_are_the_model_own_decoding(bench: Workbench) -> None:
    recording = bench.recordings[0]
    start = TOKEN_COUNT - 40
    tokens = recording.tokens[start:]
    with torch.inference_mode():
        wanted = bench.load()(input_ids=recording.tokens[None]).logits[0, start:]

    def logits(policy: Policy, at_once: int) -> torch.Tensor:
        with rows_in_daemon(bench, recording, DEFAULT_INDEX, (0, 1), start) as sequence:
            pieces = []
            for i in range(0, len(tokens), at_once):
                some = tokens[None, i : i + at_once]
                rows = [Row(sequence, policy)]
                pieces += step(bench.load(), bench.client, rows, some, start + i)
        return torch.cat([piece.logits for piece in pieces])

    # K/V are bfloat16 in the daemon.
    torch.testing.assert_close(logits(EXACT, 40), wanted, atol=0.15, rtol=0.05)
    sparse = Policy()
    torch.testing.assert_close(logits(sparse, 40), logits(sparse, 1), atol=2e-3, rtol=1e-3)


def test_a_daemon_that_drops_a_field_is_noticed(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bench.daemon_model(DEFAULT_INDEX, 0.25)
    check_policy(bench.client, model, Policy(epsilon=0.05, heavy=spillway_kv.TopP(0.9)))
    before = Policy.to_proto

    def forgetful(policy: Policy) -> Any:
        message = before(policy)
        message.ClearField("inflation")
        return message

    monkeypatch.setattr(Policy, "to_proto", forgetful)
    with pytest.raises(NotServedError, match="inflation"):
        check_policy(bench.client, model, Policy(inflation=3))


def test_every_method_is_served(bench: Workbench) -> None:
    methods = registry(bench.setting, bench.shapes)
    cases = [point.case for method in methods for point in method.points[:1]]
    outcomes = measure(bench, cases, "methods")
    for method, outcome in zip(methods, outcomes, strict=True):
        assert outcome.errors.shape == (2, 4, 4), method.name
        assert np.isfinite(outcome.errors).all(), method.name
        assert (outcome.rows > 0).all(), method.name


def test_trained_weights_are_methods_too(
    tiny: tuple[Path, Path], target: str, tmp_path: Path
) -> None:
    shapes = Shapes(layer_count=2, query_head_count=4, kv_head_count=2, head_dim=16)
    mlp, pair = tmp_path / "mlp.safetensors", tmp_path / "pair.safetensors"
    write_rotations(mlp, spillway_kv.MlpHash(hash_bits=64, hidden_dim=32), shapes, seed=0)
    described = spillway_kv.MlpHash(
        hash_bits=32,
        hidden_dim=8,
        per_query_head=True,
        raw_keys=True,
        hidden_layer_count=2,
        query_weights=True,
    )
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        generator = torch.Generator().manual_seed(layer)
        keys, queries = (ThreeLayerMlp(4, 16, 8, 32, torch.ones(4), generator) for _ in range(2))
        tensors |= HashAttentionMlps(keys, queries).tensors(layer)
    save_hash(pair, tensors, 2, described)
    options = ("--mlp", str(mlp), "--hashattention", str(pair))
    methods = ("--methods", "mlp,hashattention,twilight-mlp")
    told = evaluate(tiny, target, tmp_path, "fidelity", *methods, *options)
    for method in told["found"]["methods"]:
        assert all(math.isfinite(p["error"]["mean"]) for p in method["points"]), method["name"]


def test_every_variant_and_ranking_is_served(bench: Workbench) -> None:
    cases = [variant.case for variant in ablation.variants(bench.shapes.head_dim)]
    for outcome in measure(bench, cases, "variants"):
        assert np.isfinite(outcome.errors).all()
    retrieval.run(bench)
    told = results.read(bench.setting.output)["retrieval"]
    assert all(0 < ranking["mass"]["mean"] <= 1 for ranking in told["found"]["rankings"])


def test_outcomes_of_layers_and_stretches_join() -> None:
    def outcome(layers: int, queries: int) -> Outcome:
        return Outcome(
            errors=np.zeros((layers, queries, 4), np.float32),
            layer_errors=np.zeros((layers, queries), np.float32),
            rows=np.zeros((layers, queries, 2), np.int32),
            certified=np.zeros((layers, queries, 4), np.float32),
            none=np.zeros((layers, queries, 4), bool),
            visible=np.arange(queries),
        )

    layers = Outcome.joined([outcome(2, 3), outcome(1, 3)], axis=0)
    assert layers.errors.shape == (3, 3, 4)
    assert len(layers.visible) == 3
    queries = Outcome.joined([layers, layers], axis=1)
    assert queries.rows.shape == (3, 6, 2)
    assert len(queries.visible) == 6


def curve_point(rows: int, error: float) -> Outcome:
    rng = np.random.default_rng(rows)
    errors = error * rng.uniform(0.9, 1.1, (1, 50, 1))
    return Outcome(
        errors=errors.astype(np.float32),
        layer_errors=errors[..., 0].astype(np.float32),
        rows=np.full((1, 50, 1), rows, np.int32),
        certified=errors.astype(np.float32),
        none=np.zeros(errors.shape, bool),
        visible=np.full(50, 1000),
    )


def test_errors_at_equal_rows_are_interpolated_in_logarithms() -> None:
    curve = [curve_point(100, 0.4), curve_point(400, 0.1)]
    found = at_equal_rows(curve, curve_point(200, 0.1), seed=0)
    assert found["error"] == pytest.approx(0.2, rel=0.05)
    low, high = found["ratio_interval"]
    assert low < found["ratio"] < high
    assert found["ratio"] == pytest.approx(2, rel=0.05)
    assert at_equal_rows(curve, curve_point(50, 0.1), seed=0)["error"] is None


def test_intervals_cover() -> None:
    """Intervals must account for draws that fail together."""
    rng = np.random.default_rng(0)
    positions = np.arange(64)
    covered = independent = 0
    for _ in range(200):
        chances = np.where(rng.random(64) < 0.2, 0.5, 0.0)  # the mean is 0.1
        beyond = rng.random((10, 64, 6)) < chances[None, :, None]
        low, high = intervals.of_share(beyond, positions)
        covered += low <= 0.1 <= high
        low, high = intervals.wilson(float(beyond.mean()), beyond.size)
        independent += low <= 0.1 <= high
    assert covered >= 180
    assert independent < 100
    assert intervals.of_share(np.zeros((10, 64, 6), bool), positions)[1] < 0.01
    assert intervals.wilson(0.5, 100) == pytest.approx((0.404, 0.596), abs=1e-3)


def test_stacked_rotations_are_what_their_file_computes(tmp_path: Path) -> None:
    shapes = Shapes(layer_count=2, query_head_count=4, kv_head_count=2, head_dim=16)
    path = tmp_path / "rotations.safetensors"
    write_rotations(path, spillway_kv.MlpHash(hash_bits=64, hidden_dim=32), shapes, seed=3)
    tensors = load_file(path)
    for layer in range(2):
        w1, b1, w2 = (tensors[f"layers.{layer}.{name}"] for name in ("w1", "b1", "w2"))
        x = torch.randn(2, 5, 16)
        wanted = Hyperplanes(16, 64, 3 * 2 + layer, torch.device("cpu"))(x)
        torch.testing.assert_close(HashMlp(w1, b1, w2)(x), wanted, atol=1e-4, rtol=1e-4)


def test_channels_are_those_that_matter(bench: Workbench) -> None:
    channels = choose_channels(bench.calibration, 8)
    assert channels.shape == (2, 2, 8)
    seen = bench.calibration.layer(1)
    products = seen.queries[:, 2:, None].abs() * seen.keys[1].float().abs()[None, None]
    wanted = products.sum(1).mean((0, 1)).topk(8).indices.sort().values
    assert channels[1, 1].tolist() == wanted.tolist()


def test_tasks_fit_and_are_scored(bench: Workbench) -> None:
    text = "The grass is green. " * 2000
    sentences = text.split(". ")
    for name, maker in TASKS.items():
        task = sized(maker, "7", sentences, lambda task: len(task.context.split()), 1500)
        assert task == sized(maker, "7", sentences, lambda task: len(task.context.split()), 1500)
        assert 1300 < len(task.context.split()) <= 1500, name
        for question in task.questions:
            assert question.score(" ".join(question.answers).upper()) == 1
            assert question.ended(f"{' '.join(question.answers)} and")
            assert question.score("nothing") == 0
            assert not question.ended("nothing")
            for answer in question.answers:
                assert answer in task.context, name
            assert len(set(question.answers)) == len(question.answers)
    first, last = (needle_at(depth)(random.Random(0), sentences, 100) for depth in (0, 1))
    assert first.context.index("magic numbers for") < 300
    assert last.context.rstrip(".").endswith(last.questions[0].answers[0])
    middle = needle_at(0.5)(random.Random(0), sentences, 100)
    at = middle.context.index(middle.questions[0].answers[0])
    assert at / len(middle.context) == pytest.approx(0.5, abs=0.05)
    chain = TASKS["variable_tracking"](random.Random(0), sentences, 100)
    places = [chain.context.index(f"VAR {name} =") for name in chain.questions[0].answers]
    assert places == sorted(places)


def test_quoted_answers_are_compared_as_a_whole() -> None:
    question = Question("?", "It is `", ("'utf-8'",), 8, quoted=True)
    for given in ("utf-8`", '"UTF-8"` and', "'utf-8'\nmore", "utf-8"):
        assert question.score(given) == 1, given
    for wrong in ("utf-8-sig`", "`utf-8`", "", "utf"):
        assert question.score(wrong) == 0, wrong
    assert question.ended("x`")
    assert question.ended("x\n")
    assert not question.ended("utf-8")


def test_needle_from_end_to_end(tiny: tuple[Path, Path], target: str, tmp_path: Path) -> None:
    options = ("--lengths", "2300", "--depths", ".5,1", "--samples", "1", "--methods", "ours,codes")
    told = evaluate(tiny, target, tmp_path, "needle", *options)
    dense, ours, codes = told["found"]["methods"]
    assert dense["row_share"] == 1
    assert 0 < codes["row_share"] < 1
    assert codes["label"].endswith("share 0.04")
    assert [cell["cell"] for cell in ours["by_cell"]] == ["0.5", "1"]
    assert (tmp_path / "needle.png").exists()


def test_true_tops_and_scores() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(4, 16), torch.randn(2, 99, 16)
    tops = true_tops(queries, keys, 0.25, share=0.1)
    assert tops["own"].shape == (4, 10)
    logits = 0.25 * keys[1] @ queries[3]
    assert set(tops["own"][3]) == set(logits.topk(10).indices.tolist())
    found = [np.arange(99), tops["shared"][1]]
    scores = score(found, queries, keys, 0.25, tops)
    assert scores["mass"][:2] == pytest.approx(1, abs=1e-5)
    assert scores["iou_group"].tolist() == pytest.approx([10 / 99, 10 / 99, 1, 1])


def test_grids_and_names() -> None:
    assert grid_of(8192)[-1] == 8191
    assert len(grid_of(8192)) == 256
    assert grid_of(8192)[0] >= 8192 * 7 // 8
    assert grid_of(1024) == tuple(range(1024 - 128, 1024))
    setting = Setting("m", (), Path())
    methods = registry(setting, Shapes(2, 4, 2, 64))
    assert [m.name for m in chosen(methods, "ours, codes")] == ["ours", "codes"]
    with pytest.raises(ValueError, match="no method nonsense"):
        chosen(methods, "nonsense")
    assert [p.value for p in perplexity.thinned(methods[0], 2)] == ["0.005", "0.16"]


def test_yarn_reaches_longer_texts(tiny: tuple[Path, Path]) -> None:
    folder = str(tiny[0])
    assert language.yarn_factor(folder, 4096) == 1
    factor = language.yarn_factor(folder, 8192)
    assert factor == 2
    config = language.load_model(folder, "cpu", factor).config
    assert config.rope_parameters["rope_type"] == "yarn"
    assert config.max_position_embeddings == 8192
    with torch.inference_mode():
        model = language.load_model(folder, "cpu", factor)
        out = model(input_ids=torch.arange(64)[None])
    assert math.isfinite(float(out.logits.sum()))


def test_an_index_says_what_it_is() -> None:
    assert DEFAULT_INDEX.described() != Index(spillway_kv.RotationHash(bits_per_dim=4)).described()
    assert Case(DEFAULT_INDEX, Policy()) == Case(Index(spillway_kv.RotationHash()), Policy())
