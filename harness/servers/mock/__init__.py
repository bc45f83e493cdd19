"""An OpenAI-compatible server with known times, and faults on demand, to try measuring on.

with serving(MockConfig(ttft_s=0.1, itl_s=0.01)) as server:      # in a thread of this process
with serving_apart(MockConfig(slots=4)) as server:               # in a process of its own
python -m slo_bench.harness.servers.mock --port 8000 --ttft 0.1   # by hand
"""

from .mock_config import InjectedFault, MockConfig
from .running_mock import Mock, serving, serving_apart

__all__ = ["InjectedFault", "Mock", "MockConfig", "serving", "serving_apart"]
