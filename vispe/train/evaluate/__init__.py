"""What a retrofit took and what it left."""
