"""Learned sinks in the plugin's worker, compared with double precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from spillway_kv.vllm.layers import Attending
from spillway_kv.vllm.step_plan import StepPlan
from vllm_texts import DEVICE, HEADS, LAYERS, Model, Varlen, check, planned


def _drawn(seed: int) -> torch.Tensor:
    """Logits of a layer's sinks, from a hundredth of the weight of 40 tokens to all of it."""
    return torch.linspace(-1, 9, HEADS)[torch.randperm(HEADS, generator=_generator(seed))].to(
        DEVICE
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(params=["one by one", "together", "held"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """A model whose first layer has no sinks.

    Together: prompts that begin are attended in one call. Held: those that go on, too.
    """
    assert LAYERS == 2
    made = Model(sinks=[None, _drawn(1)])
    if request.param != "one by one":
        monkeypatch.setattr("spillway_kv.vllm.prompts._varlen", Varlen())
        made.append_later(True, 200 if request.param == "held" else 0)
    yield made
    made.worker.close()


def _without(model: Model, text: int, start: int, count: int) -> torch.Tensor:
    sinks, model.sinks = model.sinks, []
    try:
        return model.expected(text, start, count)
    finally:
        model.sinks = sinks


def test_prompts_chunks_and_steps_have_sinks(model: Model) -> None:
    texts = {1: 1, 2: 2, 3: 3}
    _, outs = model.step(StepPlan([planned(1, 0, 40, prompt=73), planned(2, 0, 5)]), texts)
    check(model, outs[1], 1, 0)
    check(model, outs[2], 2, 0)
    apart = (outs[1] - _without(model, 1, 0, 40)).abs().amax((1, 2, 3))
    assert apart[0] < 2e-5 < 0.1 < apart[1], "the second layer alone has sinks"
    plan = [planned(1, 40, 33, prompt=73), planned(2, 5, 1), planned(3, 0, 1)]
    report, outs = model.step(StepPlan(plan), texts)
    for key, start in ((1, 40), (2, 5), (3, 0)):
        check(model, outs[key], key, start)
    plan = [planned(1, 73, 1), planned(2, 6, 1), planned(3, 1, 4, decodes=True)]
    report, outs = model.step(StepPlan(plan), texts)
    for key, start in ((1, 73), (2, 6), (3, 1)):
        check(model, outs[key], key, start)
    assert not report.losses


def test_other_sinks_are_another_model_of_the_engine(model: Model) -> None:
    """Layers without sinks have -infinity. The name contains the sinks."""
    model.step(StepPlan([planned(1, 0, 3)]), {1: 1})
    (made,) = model.worker._sequences.client.list_models()
    assert made.sink_logits is not None
    assert made.sink_logits[0] == (-torch.inf,) * HEADS
    assert made.sink_logits[1] == pytest.approx(_drawn(1).tolist())
    model.worker.set_sinks([None, _drawn(2)])
    model.step(StepPlan([planned(2, 0, 3)]), {2: 2})
    assert len({each.name for each in model.worker._sequences.client.list_models()}) == 2


def test_sinks_that_are_loaded_anew(model: Model) -> None:
    """The step after loses what has the old ones. Loading the same ones again loses nothing."""
    read: list[Any] = [None, _drawn(1).clone()]
    attending = Attending(model.worker, ["a", "b"], lambda: [read[0], read[1]])

    def begin(plan: StepPlan) -> Any:
        attending.plan(plan)
        return model.step(plan, {1: 1, 2: 2, 3: 3})

    begin(StepPlan([planned(1, 0, 20), planned(2, 0, 4)]))
    attending.note_new_weights()
    report, outs = begin(StepPlan([planned(1, 20, 1)]))
    assert not report.losses
    check(model, outs[1], 1, 20)
    model.sinks = read = [None, _drawn(2)]
    attending.note_new_weights()
    report, outs = begin(StepPlan([planned(1, 21, 1), planned(3, 0, 4)]))
    assert {key: loss.kind for key, loss in report.losses.items()} == {1: "again"}
    assert report.gone == {1, 2}
    assert not outs[1].any()
    check(model, outs[3], 3, 0)
    _, outs = begin(StepPlan([planned(1, 0, 22, epoch=1), planned(3, 4, 1)]))
    check(model, outs[1], 1, 0)
    check(model, outs[3], 3, 4)
