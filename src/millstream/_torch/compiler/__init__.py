"""PyTorch's compiler: what Dynamo decides, compiles and cannot, and what its graphs say of sizes and streams."""
