"""Megatron-LM itself, in scripts, printed blocks and its process; its list has the names of all its versions."""

import re
from typing import Final

from pipeproof.interop.importers.tools.tool import Tool

MEGATRON_LM: Final = Tool(name="Megatron-LM", entry=re.compile(r"(^|/)pretrain_gpt\.py$"))
