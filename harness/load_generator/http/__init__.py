"""HTTP client of the load generator, for any OpenAI-compatible server: requests, connections,
answers.

`load_generator.routed_load.measure` sends a workload with it.
"""

from .endpoint import Endpoint
from .faults import RequestFault
from .http_options import Api, HttpOptions, PromptFormat

__all__ = ["Api", "Endpoint", "HttpOptions", "PromptFormat", "RequestFault"]
