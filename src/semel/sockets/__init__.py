"""Events over WebSockets, in many instances at once: each processed and persisted once.

async with Intake(once, table.after(handler)) as intake:
    await Listener("wss://source.example/feed", intake).run()          # instances that connect
app = FastAPI(routes=[WebSocketRoute("/events", Acceptor(intake))])    # instances that accept
"""

from semel.intake import Event, Intake, IntakeLimits, Receipt
from semel.sockets.accept import Acceptor
from semel.sockets.columns import Columns
from semel.sockets.listen import Listener
from semel.sockets.message import Fields, Invalid
from semel.sockets.table import EventTable

__all__ = [
    "Acceptor",
    "Columns",
    "Event",
    "EventTable",
    "Fields",
    "Intake",
    "Invalid",
    "Listener",
    "IntakeLimits",
    "Receipt",
]
