"""semel (Latin: once): events arrive many times; their effect happens once."""
