"""What the Lambda runtime runs in the tests."""

import os
import sqlite3
from contextlib import closing

import msgspec

import semel
from semel.integrations.aws_lambda import sqs_handler

FOLDER = os.environ["SEMEL_TEST_FOLDER"]
once = semel.open(f"sqlite:///{FOLDER}/records.db", consumer="billing")


class Paid(msgspec.Struct):
    order: str
    broken: bool = False


@sqs_handler(once)
def handler(paid: Paid) -> None:
    with closing(sqlite3.connect(f"{FOLDER}/ledger.db")) as ledger, ledger:
        ledger.execute("INSERT INTO ledger VALUES (?)", (paid.order,))
    if paid.broken:
        raise RuntimeError("not yet")
