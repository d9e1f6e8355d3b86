"""`spillway-lab bench`: experiments with the hardware that Spillway runs on."""

import typer

from spillway_kv.lab.bench.link import measure_link

app = typer.Typer(help="Measures the hardware.", no_args_is_help=True)
app.command("link")(measure_link)


@app.callback()
def bench() -> None:
    """Measures the hardware."""
