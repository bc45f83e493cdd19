import pytest

from slo_bench import Experiment, SloBenchError
from slo_bench.harness.servers.launch.server_args import check_no_secrets, expanded
from slo_bench.harness.servers.launch.server_kind import Launch


@pytest.mark.parametrize(
    "args",
    [
        ["--api-key=sk-1"],
        ["--dtype=auto", "--api-key", "sk-1"],
        ["--hf_token=hf_1"],
        ["--ssl-password=x"],
    ],
)
def test_server_arg_with_a_plain_secret_is_refused(args):
    for make in (
        lambda: check_no_secrets(args),
        lambda: Experiment(backend="vllm", model="m", rates=1, server={"args": args}),
        lambda: Launch("m", 8000, server_args=tuple(args)),
    ):
        with pytest.raises(SloBenchError, match=r"holds a secret.*=\$THAT_VARIABLE") as refused:
            make()
        assert not any(word in str(refused.value) for word in ("sk-1", "hf_1", "=x"))


def test_server_args_similar_to_secrets_are_accepted():
    check_no_secrets(["--max-num-batched-tokens=8192", "--tokenizer=x", "--api-key=$KEY"])
    check_no_secrets(["--api-key", "$KEY", "--ssl-keyfile=key.pem"])


def test_variables_of_server_args_are_expanded_at_the_start(monkeypatch):
    monkeypatch.setenv("KEY", "sk-1")
    monkeypatch.delenv("ABSENT", raising=False)
    argv = ["vllm", "--api-key=$KEY", "$KEY", '--json={"a": "$KEY"}', "--x=a$KEY"]
    assert expanded(argv) == ["vllm", "--api-key=sk-1", "sk-1", *argv[3:]]
    with pytest.raises(SloBenchError, match="ABSENT is not set"):
        expanded(["--api-key=$ABSENT"])
