"""Configurations of published models, most of no family, give the parameters of their cards."""

import json
import tomllib
from pathlib import Path

import pytest

from slo_bench.predictors.operators.assembly import default_step_time
from slo_bench.predictors.placement import Placement
from slo_bench.predictors.specs import gpu, model, models

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements" / "models.md"
MODELS = tomllib.loads(Path(__file__).with_name("published_models.toml").read_text("utf-8"))


def listed(kinds):
    """Kinds of layers, or numbers, of text such as `3 sliding_attention 1 full_attention x 8`."""
    each, repeats = kinds.split(" x ")
    words = each.split()
    values = [int(kind) if kind.isdigit() else kind for kind in words[1::2]]
    return [
        kind for count, kind in zip(words[::2], values, strict=True) for _ in range(int(count))
    ] * int(repeats)


def fields(name):
    config = dict(MODELS[name]["config"])
    for field in ("layer_types", "attn_type_list"):
        if isinstance(config.get(field), str):
            config[field] = listed(config[field])
    return config


def page_row(name, spec):
    """The row of a model on the page: card, as read, error, KV of a token, state of a sequence."""
    card = MODELS[name]["parameters"]
    error_percent = 100 * (spec.parameters / card - 1)
    kv_bytes, state_bytes = spec.kv_bytes_per_token(), spec.state_bytes
    error = f"{error_percent:+.3f} %" if abs(error_percent) >= 0.0005 else "0.000 %"
    cells = name, f"{card:,}", f"{spec.parameters:,}", error, f"{kv_bytes:,}"
    return f"| {' | '.join((*cells, f'{state_bytes:,}' if state_bytes else ''))} |"


@pytest.mark.parametrize("name", MODELS)
def test_published_model_has_the_parameters_and_bytes_of_its_card(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(fields(name)))
    spec, figures = model(tmp_path), MODELS[name]
    assert spec.parameters == pytest.approx(figures["parameters"], rel=0.005)
    assert spec.kv_bytes_per_token() == figures["kv_bytes"]
    if "state_bytes" in figures:
        assert spec.state_bytes == figures["state_bytes"]
    assert page_row(name, spec) in PAGE.read_text("utf-8")
    assert (spec.window and [spec.window.tokens, spec.window.layers]) == figures.get("window")


@pytest.mark.parametrize("name", sorted(MODELS.keys() & models().keys()))
def test_catalogue_entry_has_the_shape_of_the_published_model(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(fields(name)))
    spec, catalogued = model(tmp_path), model(name)
    for part in ("parameters", "experts", "latent", "sparse", "window", "linear", "traits"):
        assert getattr(spec, part) == getattr(catalogued, part), part
    assert spec.kv_bytes_per_token() == catalogued.kv_bytes_per_token()
    assert (spec.mixers_alone, spec.mlps_alone) == (catalogued.mixers_alone, catalogued.mlps_alone)


def test_models_of_no_family_run_from_their_configuration(tmp_path):
    """A new name of known parts needs no code, and is simulated."""
    acme = fields("glm-4.5-air") | {"model_type": "acme_7", "architectures": ["AcmeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(acme))
    spec = model(tmp_path)
    place = Placement(spec, gpu("h200-141g"), tp=4)
    place.check()
    timed = default_step_time(place).model
    assert timed.step_s(8, 8_000, ()) < timed.step_s(8, 80_000, ((0, 1000),))
