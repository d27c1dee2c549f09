"""Metadata is in pyproject.toml, the build in build_tools/."""

from setuptools import setup

from build_tools.commands import COMMANDS, PlatformDistribution

setup(distclass=PlatformDistribution, cmdclass=COMMANDS)
