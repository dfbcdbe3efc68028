"""Receive webhooks: verify, take the id, journal, answer fast, and the same for duplicates.

stripe = webhooks.Receiver(once, webhooks.stripe("whsec_..."), handler)
app = FastAPI(lifespan=stripe.lifespan)
app.add_route("/webhooks/stripe", stripe, methods=["POST"])
"""

from semel.intake import Event, IntakeLimits
from semel.webhooks.presets import github, shopify, slack, standard, stripe
from semel.webhooks.receiver import Receiver
from semel.webhooks.verify import Challenge, WebhookRefused, Scheme, Verified

__all__ = [
    "Challenge",
    "Event",
    "IntakeLimits",
    "Receiver",
    "WebhookRefused",
    "Scheme",
    "Verified",
    "github",
    "shopify",
    "slack",
    "standard",
    "stripe",
]
