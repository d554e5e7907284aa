"""What the service can be asked, as an OpenAPI document, and a page that shows it without loading
anything.
"""

from typing import Any

from driftfilter import __version__

_TENANT = {"name": "tenant", "in": "path", "required": True, "schema": {"type": "string"}}
_SEQUENCE = {
    "name": "Sequence",
    "in": "header",
    "description": "number of the step: that of the last one plus one; the same number again gets "
    "the stored answer",
    "schema": {"type": "integer", "minimum": 1},
}
_ADAPT = {"name": "adapt", "in": "query", "schema": {"type": "boolean", "default": True}}
_COUNT = {"name": "count", "in": "query", "required": True, "schema": {"type": "integer"}}
_ARRAY = {"description": "array [n, ...]", "type": "array", "items": {}}
_PROBLEM = {
    "description": "refused, nothing has changed",
    "content": {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
}


def _body(*required: str) -> dict[str, Any]:
    names = {
        "inputs": {"anyOf": [_ARRAY, {"type": "object", "additionalProperties": _ARRAY}]},
        "labels": {"type": "array", "items": {"type": "integer"}},
        "sequence": {"type": "integer", "minimum": 1},
    }
    kept = {name: names[name] for name in (*required, "sequence")}
    schema = {"type": "object", "required": list(required), "properties": kept}
    npy = {"schema": {"type": "string", "format": "binary"}}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    return {"required": True, "content": content | ({} if len(required) > 1 else {_NPY: npy})}


_NPY = "application/x-npy"


def _operation(
    summary: str, *parameters: dict[str, Any], body: dict[str, Any] | None = None
) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    return {
        "summary": summary,
        "parameters": list(parameters),
        "responses": {"200": {"description": "done", "content": answer}, "default": _PROBLEM},
        **({} if body is None else {"requestBody": body}),
    }


def document() -> dict[str, Any]:
    """The OpenAPI document."""
    fields = {"title": "string", "status": "integer", "detail": "string", "field": "string"}
    problem = {
        "type": "object",
        "properties": {
            **{name: {"type": kind} for name, kind in fields.items()},
            "value": {},
            "allowed": {"type": "string"},
        },
    }
    one = "/v1/tenants/{tenant}"
    predict = _operation("adapt, and predict", _TENANT, _SEQUENCE, _ADAPT, body=_body("inputs"))
    learn = _operation("learn from labels", _TENANT, _SEQUENCE, body=_body("inputs", "labels"))
    return {
        "openapi": "3.1.0",
        "info": {"title": "driftfilter", "version": __version__},
        "paths": {
            f"{one}/predict": {"post": predict},
            f"{one}/learn": {"post": learn},
            f"{one}/reset": {"post": _operation("back to the source", _TENANT, _SEQUENCE)},
            one: {
                "get": _operation("what is known of a tenant", _TENANT),
                "delete": _operation("forget a tenant", _TENANT),
            },
            "/v1/workers": {"post": _operation("have so many workers of --ray", _COUNT)},
            "/healthz": {"get": _operation("whether the process is alive")},
            "/readyz": {"get": _operation("whether requests can be served")},
            "/metrics": {"get": _operation("counts and times, for Prometheus")},
        },
        "components": {
            "schemas": {"Problem": problem},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


PAGE = """<!doctype html><meta charset="utf-8"><title>driftfilter</title>
<style>body{font:16px/1.5 system-ui;margin:2em auto;max-width:50em;padding:0 1em}
code{background:#8882;padding:.1em .3em}</style>
<h1>driftfilter</h1><p>One posterior for each tenant.
<a href="/openapi.json">openapi.json</a> describes it all.</p><ul id="list"></ul>
<script>
fetch("/openapi.json").then(r => r.json()).then(d => {
  for (const [path, ways] of Object.entries(d.paths))
    for (const [way, what] of Object.entries(ways)) {
      const item = document.createElement("li"), code = document.createElement("code");
      code.textContent = way.toUpperCase() + " " + path;
      item.append(code, " " + what.summary);
      document.getElementById("list").append(item);
    }
});
</script>"""
