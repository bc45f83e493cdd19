"""`slo-bench predict-train`: a predictor of output lengths, fine-tuned with LoRA."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from ...workloads.errors import SloBenchError
from ...workloads.extras import need
from ..options import predict_data
from ..options.from_schema import with_options
from ..options.parameters import OUT, flag, option, option_group

EXAMPLES = (
    "slo-bench predict-train alpaca.json sharegpt.json --out lengths",
    "slo-bench predict-train gpt4=a.jsonl llama-3-8b=b.jsonl --base path/to/MiniLM --out lengths",
    "slo-bench predict-train alpaca.json --out lengths --resume",
    "slo-bench predict-train runs/today --continue-from lengths",
)


@option_group
class Training:
    """Training options; `TrainSettings` defines their meaning."""

    head: str = option(
        "H", "Output head of the predictor: softmax, ordinal or quantile.", default="softmax"
    )
    lora_r: int = option("R", "Rank of the LoRA adapters.", default=16)
    epochs: int = option("N", "Passes over the data.", default=3)
    batch: int = option("N", "Batch size in prompts.", default=24)
    learning_rate: float = option("X", "Peak learning rate.", default=1e-3)
    waiting_weight: float = option(
        "X",
        "Weight in the loss of how much longer requests wait in the predicted order than "
        "shortest first.",
        default=0.0,
    )
    max_tokens: int = option(
        "N", "Maximum number of input tokens (prompt and model name); the rest is cut.", default=128
    )
    patience: int = option("N", "Stop after N epochs without a better validation loss.", default=2)
    test_share: float = option("SHARE", "Share of prompts held out for predict-eval.", default=0.05)


@with_options
def predict_train(
    *,
    data: list[str] = predict_data.DATA,
    training: Training,
    out: Path | None = option("DIR", "New folder for the predictor.", *OUT),
    continue_from: Path | None = option(
        "DIR",
        "Continue training this predictor on new rows of DATA, with replay of earlier rows; the "
        "result is kept only if it is no worse on earlier rows.",
    ),
    base: str | None = option(
        "PATH|NAME",
        "Base model: an encoder or a decoder, as a folder or a name on the Hugging Face hub. "
        "Default: sentence-transformers/all-MiniLM-L6-v2 (extra encoder); with --continue-from "
        "as trained.",
    ),
    columns: str | None = predict_data.COLUMNS,
    label_tokenizer: str | None = predict_data.LABEL_TOKENIZER,
    length_column: str | None = predict_data.LENGTH_COLUMN,
    buckets: str | None = option(
        "0,8,16,…", "Lower bounds of the length buckets. Default: 0,8,16,…,2048."
    ),
    seed: int = option("N", "Seed of all random numbers.", default=0),
    device: str = predict_data.device(default="auto"),
    threads: int | None = predict_data.THREADS,
    resume: bool = flag("Continue an interrupted training in --out.", "--resume"),
) -> None:
    """Fine-tune a predictor of output lengths; its input is the prompt, never the answer."""
    if (out is None) == (continue_from is None):
        raise SloBenchError(
            "give --out DIR for a new predictor, or --continue-from DIR for one to teach"
        )
    need("torch", "predict-train")
    dataset = predict_data.read_data(data, columns, label_tokenizer, length_column)
    from ...predictors.lengths.predictor_config import DEFAULT_BASE

    if continue_from is None:
        predict_data.need_model(base or DEFAULT_BASE)
    else:
        predict_data.need_base(base, continue_from)
    import torch

    from ...predictors.lengths.distribution import DEFAULT_EDGES
    from ...predictors.lengths.train import CHECKPOINT, Epoch, TrainSettings, train
    from ..interrupts import interruptible
    from ..output.progress import counted

    if threads is not None:
        torch.set_num_threads(threads)
    for note in dataset.notes:
        typer.echo(note, err=True)
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    if continue_from is not None:
        if resume:
            raise SloBenchError(
                "--resume goes with --out; --continue-from is short: begin it again"
            )
        from ...predictors.lengths.online import update_predictor

        with counted("steps") as progress:
            outcome = update_predictor(
                continue_from, dataset.rows, base=base, device=device, seed=seed, progress=progress
            )
        typer.echo(outcome.summary(), err=True)
        typer.echo(str(continue_from))
        return
    assert out is not None

    def print_epoch(epoch: Epoch) -> None:
        mark = ", best so far" if epoch.best else ""
        typer.echo(
            f"epoch {epoch.number}: training loss {epoch.train_loss:.3f}, validation loss "
            f"{epoch.validation_loss:.3f}{mark}",
            err=True,
        )

    settings = TrainSettings(
        edges=DEFAULT_EDGES if buckets is None else _edges(buckets),
        **vars(training),
        seed=seed,
        device=device,
    )
    steps_done: list[int] = []

    def way_on() -> str:
        if not (out / CHECKPOINT).is_file():
            return "interrupted before training began; nothing is kept"
        done = f"{steps_done[-1]:,} steps are" if steps_done else "what was done is"
        return f"interrupted; {done} kept in {out}: go on with the same command and --resume"

    with interruptible(way_on), counted("steps") as count:

        def count_step(done: int, total: int) -> None:
            steps_done.append(done)
            count(done, total)

        config = train(
            dataset.rows,
            out,
            labels=dataset.labels,
            base=base or DEFAULT_BASE,
            settings=settings,
            resume=resume,
            progress=count_step,
            on_epoch=print_epoch,
        )
    parts = ", ".join(f"{rows:,} {part}" for part, rows in config.training["rows"].items())
    typer.echo(
        f"rows: {parts}; lengths: {config.labels}; "
        f"{time.monotonic() - begin_s:.0f} s, {time.process_time() - begin_cpu_s:.0f} s of CPU",
        err=True,
    )
    typer.echo(str(out))


def _edges(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise SloBenchError(
            f"cannot read --buckets {text!r}; write whole numbers, as 0,8,16,32"
        ) from None
