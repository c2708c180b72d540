"""Which cached blocks are kept longer than others, until when, and which of them go first."""
