"""Checks a manifest against the schemas of versions of Kubernetes, and prints what its DaemonSet asks for, as JSON.

Usage: manifest.py FILE VERSION...
"""

import json
import sys

import kubernetes_validate
import yaml

path, *versions = sys.argv[1:]
with open(path) as file:
    documents = list(yaml.safe_load_all(file))
refused = {}
for version in versions:
    for document in documents:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            refused[version] = error.message
print(json.dumps({"refused": refused, "documents": documents}))
