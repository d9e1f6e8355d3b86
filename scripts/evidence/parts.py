"""What the evidence of the pages consists of: its parts, as a list.

A part has steps, which measure, and pages, tables and pictures, which are made from its records.
The records are below docs/results.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

from inputs import INPUTS, ROOT

RESULTS = ROOT / "docs/results"


class Step(NamedTuple):
    """A command that measures.

    Attributes:
        name: Unique in its part.
        command: For bash, in the part's work folder. $ROOT is the checkout. The inputs are beside
            it, under their names.
        makes: What it leaves in the work folder: files, with their path below docs/results.
        inputs: Names of `INPUTS`.
        continues: It continues from what an interrupted run left. If not, `makes` is removed before
            it starts again.
        is_result: `makes` are records of the pages, and not only what another step reads.
    """

    name: str
    command: str
    makes: tuple[str, ...]
    inputs: tuple[str, ...] = ()
    continues: bool = True
    is_result: bool = True


class Part(NamedTuple):
    """A part.

    Attributes:
        name: For `PARTS=`.
        about: What it shows.
        device: CPU or GPU.
        hours: How long its steps take, about: on two cores, or on one H200 with 16.
        steps: None if the code that was measured is no longer there, or if its records were
            composed of several runs by hand.
        reports: Folders below docs/results whose page `spillway-lab eval report` makes.
        scripts: Commands of Python, without `python`, that make pages or pictures. $DOCS is docs/.
        tables: Names of `TABLES`, wherever they are on the pages.
    """

    name: str
    about: str
    device: str = "CPU"
    hours: float = 0
    steps: tuple[Step, ...] = ()
    reports: tuple[str, ...] = ()
    scripts: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()


MODELS = ("smollm2", "qwen2.5-coder-1.5b")
BOUND = tuple(
    f"{model}-{length}-{text}"
    for model in MODELS
    for length in ("8k", "32k", "119k")
    for text in ("code", "prose", "german")
)
ERRORS = tuple(name for name in BOUND if re.search("-(8k|32k)-(prose|german)", name))
PROSE = tuple(name for name in ERRORS if name.endswith("prose"))
ABLATION = tuple(name for name in PROSE if "-8k-" in name)
QUALITY = tuple(
    f"qwen2.5-coder-1.5b-quality-{length}-{text}"
    for length in ("8k", "32k")
    for text in ("code", "prose")
)
ADVERSARIAL = tuple(
    f"adversarial/{name}"
    for name in (
        *("4k", "8k", "16k", "64k", "4k-late-zeros", "8k-biases"),
        *(f"value-codes-{length}" for length in ("4k", "8k", "16k", "32k")),
    )
)
RULER = tuple(f"qwen2.5-coder-1.5b-ruler-{length}" for length in ("32k", "64k", "128k"))
LONGCTX = ("qwen2.5-coder-1.5b-longctx",)
REUSE = ("reuse-smollm2-8k", "reuse-qwen2.5-coder-1.5b-8k")
EARLIER = ("8k", "32k", "119k")


def evaluation(*folders: str) -> tuple[str, ...]:
    return tuple(f"evaluation/{folder}" for folder in folders)


def recorded(section: str, *folders: str) -> tuple[Step, ...]:
    """Steps with the commands that the committed records of a section of `spillway-lab eval` name.

    Raises:
        ValueError: A record's command is not one command of `spillway-lab eval`.
    """
    steps = []
    for folder in evaluation(*folders):
        path = RESULTS / folder / f"{section}.json"
        words, own = rerun(path, json.loads(path.read_text())["command"], folder)
        name = f"{section}-{folder.rsplit('/', 1)[1]}"
        steps.append(Step(name, shlex.join(words), (f"{folder}/{section}.json",), own))
    return tuple(steps)


def joined(section: str, *folders: str) -> tuple[Step, ...]:
    """The same for records that `spillway-lab eval join` made of several runs: also their joining.

    Raises:
        ValueError: As `recorded`.
    """
    steps = []
    for folder in evaluation(*folders):
        short = folder.rsplit("/", 1)[1]
        path = RESULTS / folder / f"{section}.json"
        runs = []
        for number, command in enumerate(json.loads(path.read_text())["command"].split("`, `"), 1):
            run = f"{folder}-{number}"
            words, own = rerun(path, command, run)
            made = (f"{run}/{section}.json",)
            name = f"{section}-{short}-{number}"
            steps.append(Step(name, shlex.join(words), made, own, is_result=False))
            runs.append(run)
        command = shlex.join(["spillway-lab", "eval", "join", *runs, "--output", folder])
        makes = (f"{folder}/{section}.json", f"{folder}/{section}.jsonl")
        steps.append(Step(f"{section}-{short}", command, makes))
    return tuple(steps)


def rerun(path: Path, command: str, output: str) -> tuple[list[str], tuple[str, ...]]:
    """A command of a record with another folder, and its inputs."""
    words = shlex.split(command)
    if words[:2] != ["spillway-lab", "eval"] or "--output" not in words:
        raise ValueError(f"{path}: no command of spillway-lab eval: {shlex.join(words)}")
    # The same weights, which those runs had converted to bfloat16 beforehand.
    words = [f"{word}.gguf" if word == "Qwen2.5-Coder-1.5B-Instruct" else word for word in words]
    words[words.index("--output") + 1] = output
    return words, tuple(word for word in words if word in INPUTS)


# Of programs of bench/ that read a model's recorded K/V: name of the data, model and tokens.
RECORDED = {
    "smollm2-8k": ("SmolLM2, 8K", "SmolLM2-135M-Instruct", 8192),
    "qwen-8k": ("Qwen, 8K", "Qwen2.5-Coder-1.5B-Instruct.gguf", 8192),
    "smollm2-32k": ("SmolLM2, 32K (YaRN 4)", "SmolLM2-135M-Instruct", 32768),
}
SIX_LAYERS = {
    "smollm2-8k": "2,7,12,17,22,27",
    "qwen-8k": "0,5,10,15,20,25",
    "smollm2-32k": "2,7,12,17,22,27",
}
MANY_LAYERS = {
    "smollm2-8k": "0,2,4,6,8,10,12,14,16,18,20,22,24,26,28",
    "qwen-8k": "0,2,4,6,8,10,12,14,16,18,20,22,24,26",
    "smollm2-32k": "1,5,9,13,17,21,25,29",
}


def keys_and_values(program: str, output: str, layers: dict[str, str]) -> tuple[Step, ...]:
    """Steps of a program of bench/, with its options, that appends to one file.

    Args:
        program: Name of the file, and options.
        output: Path below docs/results.
        layers: For each of `RECORDED`.
    """
    kind = Path(output).stem
    steps = []
    for data, (name, model, length) in RECORDED.items():
        made = f"{output}.{data}"
        command = (
            f"spillway-lab eval guarantee {model} policy.txt.gz --length {length} --device cpu "
            f"--daemon-device cpu --promises stratified-codes --epsilons 0.1 --deltas 0.1 "
            f"--queries 8 --output {data}\n"
            f"python $ROOT/bench/{program} {data}/work/recordings/* --name '{name}' "
            f"--layers {layers[data]} --output {made}"
        )
        inputs = (model, "policy.txt.gz")
        steps.append(Step(f"{kind}-{data}", command, (made,), inputs, False, is_result=False))
    files = " ".join(step.makes[0] for step in steps)
    return (*steps, Step(kind, f"cat {files} > {output}", (output,), continues=False))


def small_gpu(name: str, options: str, runs: int, *inputs: str) -> Step:
    """Runs of bench/gpu/small_gpu.py, of which the fastest of each case is kept."""
    lines, earlier = [], ""
    for run in range(1, runs + 1):
        folder = f"{name}-{run}"
        lines.append(f"python $ROOT/bench/gpu/small_gpu.py {options}{earlier} --out {folder}")
        earlier = f" --earlier {folder}/small_gpu.json"
    made = f"prompts/{name}.json"
    lines.append(f"cp {name}-{runs}/small_gpu.json {made}")
    return Step(name, "\n".join(lines), (made,), inputs, continues=False)


def of_run(name: str, *more: str) -> Step:
    """A benchmark of `make bench`."""
    command = f"python $ROOT/bench/run.py {name} --out ."
    return Step(name, command, (f"{name}.json", *more), continues=False)


PARTS = (
    Part(
        "bound",
        "share of outputs with an error above epsilon, two models, three texts, 8K to 119K tokens",
        "GPU",
        0.4,
        recorded("guarantee", *BOUND),
        evaluation(*BOUND),
        ("scripts/evidence/bound_plot.py $DOCS",),
        tables=("bound", "bound-by-length"),
    ),
    Part(
        "errors",
        "errors of all methods at equal rows, and rows by bits of the codes",
        "GPU",
        0.3,
        recorded("fidelity", *ERRORS),
        evaluation(*ERRORS),
        tables=("errors", "rows-by-bits"),
    ),
    Part(
        "ablation",
        "the default policy with one part changed",
        "GPU",
        0.5,
        recorded("ablation", *ABLATION),
        evaluation(*ABLATION),
        tables=("ablation",),
    ),
    Part(
        "next-tokens",
        "next tokens after sparse decoding, compared with dense attention",
        "GPU",
        0.3,
        recorded("perplexity", *ERRORS),
        evaluation(*ERRORS),
        tables=("next-tokens",),
    ),
    Part(
        "needles",
        "needles and RULER-like tasks at 8K and 32K tokens",
        "GPU",
        0.5,
        recorded("needle", *PROSE) + recorded("ruler", *PROSE),
        evaluation(*PROSE),
        tables=("needles",),
    ),
    Part(
        "answers",
        "266 questions at 4K to 32K tokens, and next tokens",
        "GPU",
        0.3,
        recorded("longctx", *LONGCTX),
        evaluation(*LONGCTX),
        tables=("answers",),
    ),
    Part(
        "ruler",
        "RULER's tasks at 32K to 120K tokens",
        "GPU",
        0.3,
        joined("tasks", *RULER),
        evaluation(*RULER),
        tables=("ruler",),
    ),
    Part(
        "quality",
        "bounds and next tokens of the quality presets",
        "GPU",
        0.4,
        recorded("guarantee", *QUALITY) + recorded("perplexity", *QUALITY[:2]),
        evaluation(*QUALITY),
    ),
    Part(
        "adversarial",
        "the bound on generated data that is to break it",
        "CPU",
        0.3,
        recorded("adversarial", *ADVERSARIAL),
        evaluation(*ADVERSARIAL),
        tables=("adversarial",),
    ),
    Part(
        "reuse",
        "rows that neighbouring steps and layers have in common, in code that was not kept",
        reports=evaluation(*REUSE),
    ),
    Part(
        "earlier-default",
        "trained codes, MagicPIG and rankings, with the policy before page centres",
        reports=evaluation(*EARLIER),
        tables=("earlier-errors", "rankings"),
    ),
    Part(
        "methods",
        "errors of other methods as multiples of Spillway's",
        tables=("methods",),
    ),
    Part(
        "cpu",
        "attention, scores, memory, round trips and the demo on a CPU",
        "CPU",
        0.4,
        (
            *(of_run(name) for name in ("attend", "score", "memory", "rpc")),
            of_run("demo", "demo.png", "demo.txt"),
        ),
        scripts=("bench/plot.py $DOCS/results", "bench/report.py $DOCS/results"),
    ),
    Part(
        "value-codes",
        "rows over the link with and without codes of values, on two models' K/V",
        "CPU",
        2,
        (
            *keys_and_values("value_codes.py", "value-codes/rows.jsonl", SIX_LAYERS),
            *keys_and_values(
                "value_codes.py --seeds 8 --value-bits 0,2 --epsilons 0.1",
                "value-codes/seeds.jsonl",
                MANY_LAYERS,
            ),
        ),
        scripts=(
            "bench/value_codes_plot.py --explain $DOCS/images/value-codes.png "
            "--records $DOCS/results/value-codes/rows.jsonl "
            "--compare $DOCS/results/value-codes/rows.png",
        ),
        tables=(
            "value-codes",
            "value-codes-by-seed",
            "value-codes-next-tokens",
            "value-codes-gpu",
        ),
    ),
    Part(
        "row-types",
        "errors of exact attention over rows of one byte an element, and rows of 8 bits on a GPU",
        "CPU",
        0.5,
        keys_and_values("row_types.py", "row-types/rows.jsonl", SIX_LAYERS),
        tables=("row-types", "row-types-gpu"),
    ),
    Part(
        "gpu",
        "attends, decode steps, appends and the link on a GPU",
        scripts=("bench/gpu/report.py --results $DOCS/results/gpu",),
        tables=("one-layer", "same-memory", "shapes"),
    ),
    Part(
        "many-sequences",
        "tokens a second as sequences are added, whole steps, and requests at random",
        scripts=("bench/gpu/capacity_plot.py --report --results $DOCS/results/many-sequences",),
    ),
    Part(
        "prompts",
        "prompts and decoding beyond GPU memory",
        "GPU",
        0.5,
        (
            Step(
                "layer",
                "python $ROOT/bench/gpu/prompt.py --json prompts/prompt.json",
                ("prompts/prompt.json",),
                continues=False,
            ),
            small_gpu(
                "qwen2.5-coder-1.5b",
                "--model Qwen2.5-Coder-1.5B-Instruct.gguf --name Qwen2.5-Coder-1.5B-Instruct "
                "--text sources.txt --left 1.75 --engine 1.1 --ratios 0.25,0.5,1,2 --seconds 12 "
                "--steps 48",
                3,
                "Qwen2.5-Coder-1.5B-Instruct.gguf",
                "sources.txt",
            ),
            small_gpu("small_gpu", "--left 2 --engine 1.5 --seconds 30", 2),
        ),
        scripts=(
            "bench/gpu/small_gpu_plot.py $DOCS/results/prompts/small_gpu.json",
            "bench/gpu/small_gpu_plot.py $DOCS/results/prompts/qwen2.5-coder-1.5b.json",
        ),
        tables=("prompts-layer", "prompts-model", "prompts-random"),
    ),
    Part(
        "folds",
        "kernels of a decode step before and after changes, of commits that are named",
        tables=(
            "folds-tensor-cores",
            "folds-exact",
            "folds-warps",
            "folds-long",
            "folds-lanes",
            "folds-scores",
        ),
    ),
    Part(
        "faster",
        "times and rates beside dense attention and stock vLLM, from other parts",
        tables=("faster",),
    ),
    Part(
        "vllm",
        "requests served by vLLM with the plugin, beside stock vLLM",
        tables=("vllm",),
    ),
    Part(
        "fairness",
        "decode steps next to a heavy tenant, and with many connected clients",
        tables=("fairness", "fairness-two-cores", "presence"),
    ),
    Part(
        "training",
        "trained hash functions",
        tables=("training",),
    ),
    Part(
        "floods",
        "what floods cost a daemon",
        tables=("grpc-floods", "http-floods"),
    ),
)
