#!/usr/bin/env python3
"""Complete the SBOM of an environment with what the wheel itself holds of others, and print it.

Usage: scripts/sbom.py SBOM WHEEL

SBOM is a CycloneDX file in JSON, as `cyclonedx-py environment` writes it, of an environment that
has the wheel and what it needs. Prints the number of components for each licence. Exit code 1: one
has no licence, one that asks for more than to be named, or a part is not in the wheel.

Needs the standard library alone.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

PACKAGE = "slo_bench"
# Parts of the wheel by others: file, name, licence, where it comes from.
PARTS = (
    ("reports/pages/assets/plotly-basic.min.js", "plotly.js-basic-dist-min", "MIT",
     "https://github.com/plotly/plotly.js"),
    ("predictors/operators/tables/NOTICE", "AIConfigurator kernel times", "Apache-2.0",
     "https://github.com/ai-dynamo/aiconfigurator"),
    ("harness/validation/accuracy/data/NOTICE", "llm-d-benchmark and AIConfigurator measurements",
     "Apache-2.0", "https://github.com/llm-d/llm-d-benchmark"),
)  # fmt: skip
_FREE = re.compile(
    r"(MIT|Apache|BSD|0BSD|ISC|PSF|Python Software|MPL|Mozilla|Zlib|CC0|Unlicense|HPND|OFL)",
    re.IGNORECASE,
)
_COPYLEFT = re.compile(r"\b[AL]?GPL|GNU", re.IGNORECASE)
_VERSION = re.compile(rb"plotly\.js \([^)]*\) v([\d.]+)")


def licences_of(component: dict[str, Any]) -> list[str]:
    """Identifiers, names or expressions of a component's licences."""
    entries = component.get("licenses", [])
    texts = (
        entry.get("expression") or entry["license"].get("id") or entry["license"].get("name", "")
        for entry in entries
    )
    return [str(text).removeprefix("License :: OSI Approved :: ") for text in texts]


def is_free(licences: list[str]) -> bool:
    """Return True if at least one licence allows use and copies, and none asks for the source."""
    return any(map(_FREE.search, licences)) and not any(map(_COPYLEFT.search, licences))


def parts_in(wheel: Path) -> list[dict[str, Any]]:
    """A component for each of `PARTS`.

    Raises:
        KeyError: one is not in the wheel.
    """
    components = []
    with zipfile.ZipFile(wheel) as files:
        for path, name, licence, url in PARTS:
            content = files.read(f"{PACKAGE}/{path}")[:1000]
            version = _VERSION.search(content)
            components.append(
                {
                    "type": "library" if path.endswith(".js") else "data",
                    "bom-ref": f"{PACKAGE}/{path}",
                    "name": name,
                    **({"version": version[1].decode()} if version else {}),
                    "licenses": [{"license": {"id": licence}}],
                    "externalReferences": [{"type": "website", "url": url}],
                }
            )
    return components


def main(arguments: list[str]) -> int:
    """See the module."""
    sbom, wheel = map(Path, arguments)
    bom = json.loads(sbom.read_text("utf-8"))
    bom["components"] = [c for c in bom["components"] if c["name"] not in ("pip", "setuptools")]
    bom["components"] += parts_in(wheel)
    sbom.write_text(json.dumps(bom, indent=1) + "\n", "utf-8")
    counts: Counter[str] = Counter()
    problems = []
    for component in bom["components"]:
        licences = licences_of(component)
        counts[" / ".join(licences)] += 1
        if not is_free(licences):
            problems.append(f"{component['name']}: {licences or 'no licence'}")
    for text, count in counts.most_common():
        print(f"{count:3}  {text}")
    print("\n".join(problems) or f"{counts.total()} components in {sbom.name}, all with a licence")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
