"""Environments whose tools are Python functions."""

from eqx_decoders.rl.tools.tool_environment import ToolEnvironment as ToolEnvironment
from eqx_decoders.rl.tools.tool_schema import tool_schema as tool_schema
