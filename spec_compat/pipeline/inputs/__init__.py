"""What a run is made from: conversations and the verifier."""
