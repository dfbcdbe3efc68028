"""The storm behind `semel demo`: a queue that repeats itself, workers that are killed, and an honest count."""
