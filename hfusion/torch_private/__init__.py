"""Names and behaviour of torch that it does not document. This folder imports nothing of hfusion."""
