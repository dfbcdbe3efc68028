"""Receive signed webhooks: 202 as soon as they are journaled, the same for duplicates, 401 for forgeries."""

import asyncio
import base64
import time

import httpx2

import semel
from semel.ingest import webhooks
from semel.ingest.signing import signatures, signer_of

SECRET = "whsec_" + base64.b64encode(b"a secret of at least 16 bytes").decode()
ran = asyncio.Event()


async def handle(event: webhooks.Event) -> None:
    print("paid", event.id, event.payload["cents"])
    ran.set()


once = semel.aopen("sqlite:///events.db", consumer="shop-webhooks")
receiver = webhooks.Receiver(once, webhooks.standard(SECRET), handle)


async def main() -> None:
    # In an application: app = FastAPI(lifespan=receiver.lifespan)
    #                    app.add_route("/webhooks", receiver, methods=["POST"])
    body, now = b'{"type": "order.paid", "cents": 500}', int(time.time())
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(now),
        "webhook-signature": signatures([signer_of(SECRET)], "msg_1", now, body),
    }
    transport = httpx2.ASGITransport(app=receiver)
    async with once, receiver, httpx2.AsyncClient(transport=transport, base_url="http://shop") as sender:
        first = await sender.post("/webhooks", content=body, headers=headers)
        await ran.wait()
        again = await sender.post("/webhooks", content=body, headers=headers)
        forged = await sender.post("/webhooks", content=body.replace(b"500", b"900"), headers=headers)
    print(first.status_code, again.status_code, forged.status_code)


asyncio.run(main())

# prints:
# paid msg_1 500
# 202 202 401
