"""`slo-bench predict-eval`: errors of a predictor of output lengths, and of baselines."""

from __future__ import annotations

from pathlib import Path

import typer

from ...workloads.errors import SloBenchError
from ...workloads.extras import need
from ..options import predict_data
from ..options.declared import HtmlOrJson
from ..options.from_schema import with_options
from ..options.parameters import argument, option

EXAMPLES = (
    "slo-bench predict-eval lengths gpt4=held-out.jsonl",
    "slo-bench predict-eval lengths gpt4=held-out.jsonl other.jsonl --html lengths.html",
    "slo-bench predict-eval lengths alpaca.json --json",
    "slo-bench predict-eval lengths today.jsonl --prequential 100 --html drift.html",
)


@with_options
def predict_eval(
    *,
    folder: Path = argument("DIR", "Folder written by predict-train."),
    data: list[str] = predict_data.DATA,
    columns: str | None = predict_data.COLUMNS,
    label_tokenizer: str | None = predict_data.LABEL_TOKENIZER,
    length_column: str | None = predict_data.LENGTH_COLUMN,
    base: str | None = predict_data.BASE_AT,
    device: str = predict_data.device(default="cpu"),
    threads: int | None = predict_data.THREADS,
    prequential: int | None = option(
        "N",
        "Prequential evaluation: process the answers in order, N at a time; compare the "
        "predictor as trained with one that is corrected at once and retrained every N answers.",
        min=1,
    ),
    baseline: Path | None = option(
        "DIR",
        "With --prequential: also evaluate this predictor, for example one trained on such "
        "answers from the start.",
    ),
    seed: int = option("N", "Seed of the retraining of --prequential.", default=0),
    predictions: Path | None = option(
        "FILE.csv", "Also write the prediction for each prompt, a row each."
    ),
    output: HtmlOrJson,
) -> None:
    """Evaluate a predictor and three baselines on held-out answers.

    Rows with a prompt used in training are left out and counted.
    """
    need("torch", "predict-eval")
    from ...predictors.lengths.predictor_config import PredictorConfig

    config = PredictorConfig.load(folder)
    dataset = predict_data.read_data(data, columns, label_tokenizer, length_column)
    predict_data.check_units(config.labels, dataset)
    dataset = predict_data.with_known_models(dataset, config.shape.models)
    predict_data.need_base(base, folder)
    for note in dataset.notes:
        typer.echo(note, err=True)
    import torch

    from ...predictors.lengths.evaluate_predictor import evaluate
    from ...predictors.lengths.length_samples import read_samples, seen_in
    from ...predictors.lengths.predictor import TrainedPredictor
    from ...reports.pages import predictor_page as shown
    from ..output.progress import counted

    if threads is not None:
        torch.set_num_threads(threads)
    if predictions is not None and prequential is not None:
        raise SloBenchError("--predictions is of one predictor; leave --prequential out")
    if baseline is not None and prequential is None:
        raise SloBenchError("--baseline goes with --prequential N")
    if prequential is not None:
        from ...predictors.lengths.online import OnlinePredictor
        from ...predictors.lengths.stream import load_baseline
        from ...predictors.lengths.stream import stream as streamed

        online = OnlinePredictor(folder, base=base, device=device, seed=seed, keep_queue=False)
        other = (
            None if baseline is None else load_baseline(baseline, online, dataset.rows, base=base)
        )
        with counted("answers") as progress:
            evaluation = streamed(
                online, dataset.rows, every=prequential, baseline=other, progress=progress
            )
        output.show(
            evaluation,
            lambda evaluation, html: shown.write_stream(evaluation, config, html),
            shown.stream_json,
            shown.stream_text,
        )
        return
    samples = read_samples(folder / config.samples_file)
    was_trained_on = seen_in(samples)
    if all(was_trained_on(row) for row in dataset.rows):
        raise SloBenchError(
            f"all {len(dataset.rows):,} prompts were learnt or calibrated from, and would flatter; "
            "give other data, or train with a --test-share"
        )
    predictor = TrainedPredictor.load(folder, base=base, device=device)
    with counted("parts") as progress:
        result = evaluate(predictor, samples, dataset.rows, was_trained_on, progress=progress)
    if predictions is not None:
        from ...predictors.lengths.evaluate_predictor import write_predictions

        write_predictions(
            predictor, [row for row in dataset.rows if not was_trained_on(row)], predictions
        )
    output.show(
        result,
        lambda result, html: shown.write_evaluation(result, config, html),
        lambda result: shown.evaluation_json(result, config),
        lambda result: shown.evaluation_text(result, config),
    )
