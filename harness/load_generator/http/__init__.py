"""The load generator: any OpenAI-compatible server, as a client that stamps what really happened.

`clusters.servers.measure` runs a workload over it.
"""

from .endpoint import Endpoint
from .faults import RequestFault
from .options import Api, HttpOptions, PromptFormat

__all__ = ["Api", "Endpoint", "HttpOptions", "PromptFormat", "RequestFault"]
