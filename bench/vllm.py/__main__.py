"""`python bench/vllm.py`: bench/vllm_engine.py, under the name of its figures.

A folder: a file of this name, beside the other scripts, would be taken for the package vllm, by TRL for one.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vllm_engine import main

sys.exit(main())
