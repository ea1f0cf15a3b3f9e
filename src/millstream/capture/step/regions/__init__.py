"""Steps with eager regions."""
