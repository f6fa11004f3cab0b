"""Generated from ``protos/diloco/wire/v1`` by ``make protos``; not edited by hand."""
