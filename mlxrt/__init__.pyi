"""Types of the public names, which `__init__.py` imports when they are first asked for."""

from .config import EngineConfig as EngineConfig
from .engine.async_engine import AsyncEngine as AsyncEngine
from .engine.async_engine import AsyncSession as AsyncSession
from .engine.async_stream import AsyncReply as AsyncReply
from .engine.async_stream import AsyncStream as AsyncStream
from .engine.engine import Engine as Engine
from .engine.load import load as load
from .engine.logits import LogitsRow as LogitsRow
from .engine.logits import LogitsView as LogitsView
from .engine.memory import Cost as Cost
from .engine.request import Completion as Completion
from .engine.request import EngineEvent as EngineEvent
from .engine.request import Event as Event
from .engine.request import Finish as Finish
from .engine.request import Request as Request
from .engine.request import SamplingParams as SamplingParams
from .engine.request import Timings as Timings
from .engine.session import Reply as Reply
from .engine.session import Session as Session
from .engine.stats import Stats as Stats
from .errors import BadCheckpoint as BadCheckpoint
from .errors import BadLogits as BadLogits
from .errors import BadRequest as BadRequest
from .errors import BadSnapshot as BadSnapshot
from .errors import BadTemplate as BadTemplate
from .errors import BadTokenizer as BadTokenizer
from .errors import CacheCorrupt as CacheCorrupt
from .errors import CannotRewind as CannotRewind
from .errors import ContextOverflow as ContextOverflow
from .errors import EngineClosed as EngineClosed
from .errors import EngineFailed as EngineFailed
from .errors import EvictedBlock as EvictedBlock
from .errors import GrammarFailed as GrammarFailed
from .errors import HubError as HubError
from .errors import MlxrtError as MlxrtError
from .errors import ModelNotFound as ModelNotFound
from .errors import NoKernel as NoKernel
from .errors import NoRoom as NoRoom
from .errors import NoTokenizer as NoTokenizer
from .errors import PromptWontFit as PromptWontFit
from .errors import QueueFull as QueueFull
from .errors import StaleLogits as StaleLogits
from .errors import UnsupportedContent as UnsupportedContent
from .errors import UnsupportedModel as UnsupportedModel
from .errors import WontFit as WontFit
from .text.parsing.segments import ToolCall as ToolCall
from .text.parsing.segments import ToolCallDelta as ToolCallDelta

__version__: str
missing_backend: ImportError | None
__all__: list[str]
