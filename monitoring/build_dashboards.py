"""python -m monitoring.build_dashboards: write grafana/dashboards/*.json.

    kv.json        kv_panels.py
    service.json   service_panels.py
    engine.json    engine_panels.py

The JSON is committed, so that Grafana needs no build; a test holds it against these files.
"""

import json
from pathlib import Path

from monitoring.engine_panels import engine_panels
from monitoring.kv_panels import kv_panels
from monitoring.panels import dashboard
from monitoring.service_panels import service_panels

DASHBOARDS = Path(__file__).parent / "grafana" / "dashboards"


def build() -> dict[str, str]:
    """File name -> content."""
    dashboards = {
        "kv.json": dashboard("pagestream-kv", "Pagestream: KV memory", kv_panels()),
        "service.json": dashboard("pagestream-service", "Pagestream: service", service_panels()),
        "engine.json": dashboard("pagestream-engine", "Pagestream: engine and queue", engine_panels()),
    }
    return {name: json.dumps(content, indent=2) + "\n" for name, content in dashboards.items()}


if __name__ == "__main__":
    for file_name, content in build().items():
        (DASHBOARDS / file_name).write_text(content)
