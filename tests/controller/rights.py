"""Marks of tests that need an account with certain rights."""

from __future__ import annotations

import os

import pytest

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="files of other users can be made by root only")
