"""Pictures and the page of `vispe rotate`."""
