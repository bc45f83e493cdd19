"""Makes vLLM run as on CPU, also a build for CUDA, which finds no platform without its driver.

Imported before the rest of vLLM, which asks for the platform while it is imported.
"""

from vllm import platforms
from vllm.platforms.cpu import CpuPlatform

platforms._current_platform = CpuPlatform()
