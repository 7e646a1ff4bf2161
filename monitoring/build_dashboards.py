"""Write grafana/dashboards/*.json from the panel modules.

The JSON is committed, so that Grafana needs no build; a test compares it with these modules.
"""

import json
from pathlib import Path

from monitoring.engine_panels import engine_panels
from monitoring.kv_panels import kv_panels
from monitoring.panels import dashboard
from monitoring.service_panels import service_panels

DASHBOARDS = Path(__file__).parent / "grafana" / "dashboards"


def build() -> dict[str, str]:
    """Return file name -> content."""
    dashboards = {
        "kv.json": dashboard("pagestream-kv", "Pagestream: KV memory", kv_panels()),
        "service.json": dashboard("pagestream-service", "Pagestream: service", service_panels()),
        "engine.json": dashboard("pagestream-engine", "Pagestream: engine and queue", engine_panels()),
    }
    return {name: json.dumps(content, indent=2) + "\n" for name, content in dashboards.items()}


if __name__ == "__main__":
    for file_name, content in build().items():
        (DASHBOARDS / file_name).write_text(content)
