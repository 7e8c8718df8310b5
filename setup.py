"""Map the top-level folders onto the one package ``assay`` (the reason is in DESIGN: a top-level ``kernels`` breaks transformers)."""

from setuptools import find_namespace_packages, setup

FOLDERS = ("assets", "kernels", "ops", "schemas", "warehouse")
found = find_namespace_packages(".", include=[pattern for folder in FOLDERS for pattern in (folder, f"{folder}.*")])
setup(packages=["assay", *(f"assay.{name}" for name in found)], package_dir={"assay": "."})
