import base64
import html
import json
from urllib.parse import quote, quote_plus

import pytest

from slo_bench import SloBenchError
from slo_bench.workloads import masking
from slo_bench.workloads.masking import (
    MASK,
    environment_variable,
    masked,
    masked_bytes,
    register,
    register_user_info,
)

KEY = 'sk-top/sec"ret+98=7&<6'


@pytest.fixture(autouse=True)
def none_before(monkeypatch):
    monkeypatch.setattr(masking, "_patterns", {})
    monkeypatch.setattr(masking, "_pattern", None)


@pytest.mark.parametrize(
    "form",
    [
        KEY,
        KEY.upper(),
        quote(KEY),
        quote_plus(KEY),
        quote(quote(KEY, safe="")),
        json.dumps(json.dumps(KEY)),
        json.dumps(KEY).replace("/", "\\/"),
        html.escape(KEY),
        html.escape(html.escape(KEY)),
        "".join(f"\\u{ord(c):04x}" for c in KEY),
        "".join(f"%{ord(c):02X}" for c in KEY),
        "".join(f"&#x{ord(c):x};" for c in KEY),
        KEY.encode().hex(),
        KEY.encode().hex(":").upper(),
        "".join(f"\\{ord(c):03o}" for c in KEY),
        "\u200b".join(KEY),
        f"{KEY[:9]}\n  {KEY[9:]}",
        base64.b64encode(base64.b64encode(f"to {KEY}".encode())).decode(),
        *(
            base64.b64encode(f"{start}{KEY}".encode()).decode()
            for start in ("", "u:", "me:", "you:")
        ),
        base64.urlsafe_b64encode(f"Bearer {KEY}!".encode()).decode(),
    ],
)
def test_masked_hides_every_form_of_a_secret(form):
    register(KEY)
    hidden = masked(f"Incorrect key: {form}. Try again")
    assert MASK in hidden
    assert form not in hidden
    assert hidden.startswith("Incorrect key: ")
    assert hidden.endswith(". Try again")
    assert masked_bytes(b"\xff key " + form.encode()).startswith(b"\xff key ")
    assert form.isascii() == (form.encode() not in masked_bytes(form.encode()))


def test_a_longer_secret_is_masked_before_one_that_is_part_of_it():
    register("sk-first-key")
    register("sk-first-key-and-more")
    assert masked("sk-first-key-and-more, sk-first-key") == f"{MASK}, {MASK}"


@pytest.mark.parametrize("word", ["EMPTY", "none", "test", "a1", "-"])
def test_placeholders_and_tiny_keys_are_not_masked(word):
    register(word)
    assert masked(f"a {word} b") == f"a {word} b"


def test_short_secret_is_masked_as_a_word_of_its_own():
    register("sk-1")
    assert masked("sk-1: no sk-12, task-1 or 'sk-1'") == f"{MASK}: no sk-12, task-1 or '{MASK}'"


def test_password_of_basic_credentials_is_masked():
    register("Basic " + base64.b64encode(b"me:open sesame 1").decode())
    assert masked("user me, open sesame 1") == f"user me, {MASK}"


def test_environment_variable_registers_what_it_returns(monkeypatch):
    monkeypatch.setenv("A_KEY", " sesame-open\r\n")
    assert environment_variable("A_KEY") == "sesame-open"
    assert masked("sesame-open") == MASK


@pytest.mark.parametrize(
    ("value", "code"),
    [("sk–key", "2013"), ("a\nb", "000A"), ("a\x07b", "0007"), ("kéy", "00E9"), ("a\x7f", "007F")],
)
def test_environment_variable_refuses_what_no_header_carries(monkeypatch, value, code):
    monkeypatch.setenv("A_KEY", value)
    with pytest.raises(SloBenchError, match=rf"A_KEY holds U\+{code} as its character") as refused:
        environment_variable("A_KEY")
    assert value not in str(refused.value)


def test_register_user_info_masks_passwords_of_addresses():
    register_user_info("--to=https://me:p%40ss-word1@host/x and mysql://token-12345@db")
    shown = masked("me:p%40ss-word1@host p@ss-word1, token-12345")
    assert shown == f"{MASK}@host {MASK}, {MASK}"
    register_user_info("https://host/path/long-name@part?x=y@z")
    assert masked("long-name") == "long-name"


def test_key_in_place_of_the_name_of_its_variable_is_not_said_again():
    with pytest.raises(SloBenchError, match="by the name of an environment variable") as refusal:
        environment_variable("sk-topsecret-987654")
    assert "topsecret" not in str(refusal.value)
