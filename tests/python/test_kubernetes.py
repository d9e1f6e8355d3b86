"""The Kubernetes manifest is one that Kubernetes takes."""

from pathlib import Path

import kubernetes_validate
import pytest
import yaml

MANIFEST = Path(__file__).parents[2] / "docs/operations/kubernetes/deployment.yaml"


def test_the_manifest_fits_the_published_schema() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    kubernetes_validate.validate(manifest, "1.30", strict=True)


def test_a_misspelt_field_does_not_fit() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, "1.30", strict=True)
